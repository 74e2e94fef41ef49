"""Files in the folder of a run, and their integrity."""
