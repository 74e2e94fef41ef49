"""Data attribution: scores of training examples judged by retraining."""
