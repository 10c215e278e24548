"""Rollouts from engines: who samples, how, and what comes back."""

from pipelines.generation.engine import Engine, Sampled, Sampling

__all__ = ["Engine", "Sampled", "Sampling"]
