"""Cost of a pass, an update and a predictive, beside limits of any method and beside peers."""
