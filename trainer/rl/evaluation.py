"""The policy of a version on tasks of its own, at its own sampling."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing
from typing import Any

import polars as pl

import pipelines
import rollout_io
from pipelines.generation.config import GenerateConfig
from pipelines.generation.dataset import GroupWriter, missing_tasks
from pipelines.generation.engine import Engine
from pipelines.generation.generator import Generator
from pipelines.generation.tasks import read_tasks
from rollout_io.retokenize.tokenizer import ChatTokenizer
from trainer.rl.config import EvaluateConfig, RlConfig


def sampling_of(config: EvaluateConfig) -> GenerateConfig:
    """How an evaluation samples."""
    values = dataclasses.asdict(config)
    return GenerateConfig(**{k: v for k, v in values.items() if k != "every_iterations"})


async def evaluate(
    engine: Engine, tokenizer: ChatTokenizer, config: RlConfig, version: int
) -> dict[str, Any]:
    """Sample what the evaluation of a version lacks; its metrics.

    Raises:
        RolloutError: As `pipelines.generation.run.generate`.
    """
    planned = config.evaluation(version)
    assert planned is not None
    sampling = sampling_of(planned)
    missing = missing_tasks(read_tasks(sampling.tasks, sampling.group_size), sampling)
    if missing:
        generator = Generator(engine, tokenizer, sampling)
        generator.check(missing)
        with GroupWriter(sampling.out, missing, generator.metadata, sampling) as writer:
            async with aclosing(generator.run(missing)) as ended:
                async for finished in ended:
                    writer.add(finished)
    return measure(sampling.out, config)


def measure(path: str, config: RlConfig) -> dict[str, Any]:
    """The metrics of an evaluation's dataset."""
    rollouts = rollout_io.scan(path)
    returns = pipelines.trajectory_returns(rollouts, config.training.outcome).collect()
    good = returns.filter(pl.col("error").is_null())
    return {
        "evaluation/return_mean": good["return"].mean(),
        "evaluation/num_trajectories": len(returns),
        "evaluation/num_failed": len(returns) - len(good),
    }
