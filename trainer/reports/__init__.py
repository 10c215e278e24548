"""Reports about a run: dry run, memory estimate, plots."""
