"""Class probabilities of shifted and out-of-distribution data."""
