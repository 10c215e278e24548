"""Merge steps into sequences, and split them again: prefix tree, lineages, merge, unmerge."""
