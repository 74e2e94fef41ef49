"""What the commands do, and their options."""
