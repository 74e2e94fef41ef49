"""Charts of the report's page, as plain data that plotly.js draws."""
