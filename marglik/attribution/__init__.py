"""Attribution of predictions to training examples."""
