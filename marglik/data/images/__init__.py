"""Images with labels: where they come from, how they are read, checked and corrupted."""
