"""The curvature's blocks B ⊗ A: algebra, eigenvalues, spectra, files."""
