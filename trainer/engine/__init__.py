"""The embedded engine: sample from a Transformers model in this process."""
