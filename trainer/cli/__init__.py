"""Commands of this package: `train`, `plot`, `generate`, `rl`, `audit`, `blame`, `replay`."""
