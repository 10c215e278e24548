"""Reports about a run or a dataset: dry run, plots."""
