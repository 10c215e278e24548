"""Replay an update of a training run from its checkpoints and its stored data."""
