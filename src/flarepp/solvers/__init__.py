"""PDE solvers that make benchmark data when nothing is downloaded: pure numerics, one file per dataset."""
