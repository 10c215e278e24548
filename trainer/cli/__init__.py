"""The verbs `train`, `plot`, `generate` and `rl`."""
