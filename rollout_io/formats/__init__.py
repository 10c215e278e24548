"""Readers and writers of log formats; `base` defines the interface, `parsing` has shared code."""
