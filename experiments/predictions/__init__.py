"""Class probabilities: where they come from, beside rivals, and on shifted data."""
