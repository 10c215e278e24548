"""Configuration of a training run."""
