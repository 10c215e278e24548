"""The verbs of this package."""
