"""Command-line verbs of this package."""
