"""Plan a run, and pack the rows of its batches into forests of tokens: chains or trees."""
