"""Commands that this package adds to `rollouts`."""
