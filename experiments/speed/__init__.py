"""What a pass, an update and a predictive cost, beside limits of any method and beside peers."""
