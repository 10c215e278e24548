"""Score recorded trajectories again, and keep each new reward as a version beside the dataset."""
