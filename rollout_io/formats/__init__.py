"""Readers and writers of log formats; `base` defines the interface, `parsing` is shared code."""
