"""Generate rollouts with an engine, in environments, by agents, harnesses or custom generators."""

from pipelines.generation.engines.base import Engine, Picture, Sampled, Sampling

__all__ = ["Engine", "Picture", "Sampled", "Sampling"]
