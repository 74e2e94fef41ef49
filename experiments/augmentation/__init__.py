"""What learned invariances bring."""
