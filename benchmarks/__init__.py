"""Benchmarks that compare two measurements taken in one run (`make bench`)."""
