"""Make an update of a training run again from its checkpoints and its stored data."""
