"""Engines: token prompts in, sampled tokens and their log-probabilities out."""
