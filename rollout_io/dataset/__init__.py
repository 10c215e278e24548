"""Rollout datasets as files: reading, writing, prefix layout, footers, checks, atomic writes."""
