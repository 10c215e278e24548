"""Steps to sequences and back: the prefix tree, lineages, merge and unmerge."""
