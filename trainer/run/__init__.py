"""One training run, from its first check to its last checkpoint."""
