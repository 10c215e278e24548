"""Statistics of a table: metrics, counts, and the cost of training on it."""
