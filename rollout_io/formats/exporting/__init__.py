"""Export of a dataset to other projects' formats; `formats.NAME_export` has a function `write`."""
