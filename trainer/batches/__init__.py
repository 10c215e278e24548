"""Load batches of a dataset and pack them into forests of tokens."""
