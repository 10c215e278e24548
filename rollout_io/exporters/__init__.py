"""A dataset in other projects' formats: one module each, with one function `write`."""
