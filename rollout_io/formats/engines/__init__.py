"""Engines, which find and read the runs of logs that a grammar describes."""
