"""Train one model with several processes."""
