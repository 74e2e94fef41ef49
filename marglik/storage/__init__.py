"""Read and write the files in the folder of a run, and verify them."""
