"""Evaluate the policy on evaluation sets, which may have different sampling settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

import rollout_io
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import Engine
from pipelines.generation.generator import Generator
from pipelines.generation.run import GroupWriter, missing_tasks
from pipelines.generation.tasks import Task, read_tasks
from pipelines.rewards import is_above, trajectory_returns
from pipelines.statistics.metrics import pass_at_k
from rollout_io.dataset.blobs import Blobs
from rollout_io.formats.skyrl_fields import ROLLOUT_METRICS, aggregated
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from rollout_io.terminal import Bar
from schemas.errors import count
from trainer.rl.config import EvaluateConfig, RlConfig
from trainer.rl.reporting import SamplingProgress

if TYPE_CHECKING:
    from pipelines.harness.launchers import Endpoint
    from pipelines.harness.recorded_calls import Calls


def notes_of(config: RlConfig) -> Iterator[str]:
    """Yield notes about evaluation settings that are probably unintended."""
    for name, planned in config.evaluations(0).items():
        if planned.group_size > 1 and planned.temperature == 0:
            table = f"evaluate.{name}".rstrip(".")
            yield (
                f"note: [{table}] samples each task {planned.group_size} times at temperature 0,"
                " where all samples are the same; set a temperature above 0, or group_size = 1"
            )


class EvaluationSet(NamedTuple):
    """What an evaluation set reads from files: its tasks, once per attempt, and its tokenizer."""

    tasks: list[Task]
    tokenizer: ChatTokenizer


def read_sets(config: RlConfig, tokenizer: ChatTokenizer) -> dict[str, EvaluationSet]:
    """Read the evaluation sets, by name: at the start, because user code may call `os.chdir` later.

    Args:
        config: Configuration of the run.
        tokenizer: The tokenizer that samples rollouts.

    Raises:
        RolloutError: The tasks or the chat template of a set are not usable.
    """
    sets = {}
    for name, one in config.evaluations(0).items():
        set_tokenizer = tokenizer
        if one.chat_template != config.generation.chat_template:
            set_tokenizer = load_tokenizer(config.model.path, one.chat_template)
        set_tokenizer = dataclasses.replace(set_tokenizer, template_kwargs=one.chat_template_kwargs)
        sets[name] = EvaluationSet(read_tasks(one.tasks, one.group_size), set_tokenizer)
    return sets


async def evaluate(
    engine: Engine,
    sets: Mapping[str, EvaluationSet],
    config: RlConfig,
    version: int,
    calls: Calls | Endpoint | None = None,
    bar: Bar | None = None,
) -> dict[str, Any]:
    """Sample the missing evaluation trajectories of a version, set by set, and return the metrics.

    Progress is shown below `bar` on a terminal, and logged otherwise; without a bar, it is neither
    shown nor logged.

    Raises:
        RolloutError: See `pipelines.generation.run.generate`.
    """
    planned = config.evaluations(version)
    for name, one in planned.items():
        values = {k: v for k, v in dataclasses.asdict(one).items() if k != "every_iterations"}
        subject = f"evaluation after {count(version, 'iteration')}{f' ({name})' if name else ''}"
        await _sample(engine, sets[name], GenerateConfig(**values), calls, subject, bar)
    return measure(planned, sets, config)


async def _sample(
    engine: Engine,
    evaluated: EvaluationSet,
    sampling: GenerateConfig,
    calls: Calls | Endpoint | None,
    subject: str,
    bar: Bar | None,
) -> None:
    missing = missing_tasks(evaluated.tasks, sampling)
    if missing:
        store = Blobs.of(sampling.out)
        generator = Generator(engine, evaluated.tokenizer, sampling, calls, "eval", store)
        generator.check(missing)
        with (
            GroupWriter(sampling.out, missing, generator.metadata, sampling) as writer,
            SamplingProgress(bar, subject, len(missing)) as shown,
        ):
            async with aclosing(generator.run(missing)) as ended:
                done = 0
                async for finished in ended:
                    writer.add(finished)
                    done += 1
                    shown.show(done)


def measure(
    planned: Mapping[str, EvaluateConfig], sets: Mapping[str, EvaluationSet], config: RlConfig
) -> dict[str, Any]:
    """Compute the metrics of evaluation datasets: over all of them, and per set.

    A trajectory's return is defined by `data.outcome` if set, else by the set's `outcome`.
    """
    metrics, parts = dict[str, Any](), list[pl.DataFrame]()
    for name, one in planned.items():
        outcome = config.data.outcome or one.outcome
        returns = trajectory_returns(rollout_io.scan(one.out), outcome).collect()
        part = returns.select("instance_id", "return", pl.col("error").is_null().alias("is_good"))
        parts.append(part)
        metrics |= set_metrics(name, part.filter("is_good"), sets[name].tasks, one.group_size)
        metrics |= _of_generator(f"eval/{name or 'all'}/", one.out)
    rows = pl.concat(parts)
    return {
        "evaluation/return_mean": rows.filter("is_good")["return"].mean(),
        "evaluation/num_trajectories": len(rows),
        "evaluation/num_failed": int((~rows["is_good"]).sum()),
        **metrics,
    }


def _of_generator(prefix: str, dataset: str) -> dict[str, float]:
    """Combine the `rollout_metrics` that a custom generator returned."""
    scanned = rollout_io.scan(dataset)
    if ROLLOUT_METRICS not in scanned.collect_schema():
        return {}
    objects = scanned.select(pl.col(ROLLOUT_METRICS).drop_nulls()).collect()[ROLLOUT_METRICS]
    return {f"{prefix}{key}": value for key, value in aggregated(objects).items()}


def set_metrics(
    name: str, returns: pl.DataFrame, tasks: Sequence[Task], group_size: int
) -> dict[str, Any]:
    """Compute SkyRL's metrics of an evaluation set: overall, and per `data_source` of its tasks.

    A set without a name has `eval/all/...` and `eval/{source}/...`, as in SkyRL, where tasks
    without a source are `unknown`; a named set has `eval/{name}/...`, and
    `eval/{name}/{source}/...` for tasks with a source.

    Args:
        name: Name of the set.
        returns: instance_id and return of the trajectories that did not fail.
        tasks: Tasks of the set, with the sources.
        group_size: Largest n of `pass_at_n`.
    """
    unknown = None if name else "unknown"
    source = {t.instance_id: t.extras.get("data_source") or unknown for t in tasks}
    of_row = [source.get(instance, unknown) for instance in returns["instance_id"]]
    named = [None if s is None else str(s).replace("/", "_") for s in of_row]
    rows = returns.with_columns(source=pl.Series(named, dtype=pl.String))
    prefix = f"eval/{name}/" if name else "eval/"
    metrics = _scores(f"eval/{name or 'all'}/", rows, group_size)
    for set_name in sorted(set(named) - {None}, key=str):
        part = rows.filter(pl.col("source") == set_name)
        metrics |= _scores(f"{prefix}{set_name}/", part, group_size)
    return metrics


def _scores(prefix: str, returns: pl.DataFrame, group_size: int) -> dict[str, Any]:
    correct = is_above(pl.col("return"), 0.0).sum()
    counts = returns.group_by("instance_id").agg(num=pl.len(), num_correct=correct)
    attempts = counts.select("num", "num_correct").rows()
    metrics = {
        f"{prefix}avg_score": returns["return"].mean(),
        f"{prefix}mean_positive_reward": returns["return"].clip(lower_bound=0.0).mean(),
    }
    for n in range(1, group_size + 1):
        passed = [pass_at_k(num, correct, n) for num, correct in attempts if num >= n]
        metrics[f"{prefix}pass_at_{n}"] = sum(passed) / len(passed) if passed else None
    return metrics
