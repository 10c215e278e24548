"""`rollouts convert`: harness logs to a rollout dataset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from rollout_io.cli.formats import note_failures
from rollout_io.cli.output import emit_json, example, next_command, note, progress_bar

if TYPE_CHECKING:
    import pyarrow as pa

    from rollout_io.adapters import Adapter

AUTO = "auto"
_READS = 2  # adapters read their input once to check it and once to convert it


@click.command(
    epilog=example("rollouts convert shop.calls.jsonl --rewards shop.rewards.jsonl --out shop/")
)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path())
@click.option(
    "--format",
    "format_name",
    default=AUTO,
    show_default=True,
    help="Format of the logs (`rollouts formats` lists them); auto: by their content.",
)
@click.option("--rewards", type=click.Path(), metavar="FILE", help="JSONL of outcomes.")
@click.option("--out", required=True, metavar="DS", help="Dataset directory to write.")
@click.option(
    "--layout",
    type=click.Choice(["prefix", "full"]),
    default="prefix",
    show_default=True,
    help="Prompts as references to earlier steps, or in full.",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["raw", "processed"]),
    help="Log-probabilities before or after temperature and truncation (vLLM: raw).",
)
@click.option("--tokenizer", metavar="NAME", help="Name of the tokenizer, noted in the files.")
@click.option("--json", "as_json", is_flag=True, help="Summary as JSON on stdout.")
def convert(
    inputs: tuple[str, ...],
    format_name: str,
    rewards: str | None,
    out: str,
    layout: Literal["prefix", "full"],
    logprobs_mode: Literal["raw", "processed"] | None,
    tokenizer: str | None,
    *,
    as_json: bool,
) -> None:
    """Convert agent logs to a rollout dataset.

    Every record is checked before anything is written: one bad record, and nothing is.
    """
    from rollout_io.writer import RolloutWriter
    from schemas.metadata import DatasetMetadata

    found, adapter = choose_format(format_name, inputs)
    summary = Summary()
    with progress_bar(_READS * _num_bytes(inputs), "B", "convert") as progress:
        tables = adapter.read(inputs, rewards=rewards, progress=progress)
        first = list(islice(tables, 1))
        about = _about(first)
        metadata = DatasetMetadata(tokenizer=tokenizer, logprobs_mode=logprobs_mode).made(
            "convert",
            tool=f"rollout-io {version('rollout-io')}",
            format=found,
            inputs=list(inputs),
            rewards=rewards,
            **about,
        )
        with RolloutWriter(out, layout=layout, metadata=metadata) as writer:
            for table in chain(first, tables):
                writer.write(table)
                summary.add(table)
    if format_name == AUTO:
        note(f"format: {found}")
    for name in about:
        note(f"{name}: in the history of the dataset (`made_by`), for no row has a place for them")
    if as_json:
        emit_json(summary.to_dict())
    else:
        note(summary.text(out))
        next_command(f"rollouts validate {out}")


def choose_format(name: str, inputs: Sequence[str]) -> tuple[str, Adapter]:
    """The format of that name, or under `auto` the one that all inputs are of."""
    from rollout_io.adapters.detect import detect, find_adapter, load_formats

    if name != AUTO:
        return name, find_adapter(name)
    known = load_formats()
    note_failures(known)
    found = detect(inputs, known.adapters)
    return found, known.adapters[found]


def _about(tables: Sequence[pa.Table]) -> dict[str, Any]:
    """What a log says of itself as a whole, beside its rows."""
    from rollout_io.adapters import ABOUT

    metadata = (tables[0].schema.metadata or {}) if tables else {}
    named = {key.decode(errors="replace"): value for key, value in metadata.items()}
    return {k.removeprefix(ABOUT): json.loads(v) for k, v in named.items() if k.startswith(ABOUT)}


def _num_bytes(inputs: Sequence[str]) -> int:
    files = [
        f for path in map(Path, inputs) for f in (path.rglob("*") if path.is_dir() else [path])
    ]
    return sum(file.stat().st_size for file in files if file.is_file())


@dataclass(slots=True)
class Summary:
    """Counts of what was converted."""

    num_calls: int = 0
    num_rows: int = 0
    num_trajectories: int = 0
    num_failed: int = 0
    num_without_reward: int = 0
    num_without_logprobs: int = 0
    reward_sum: float = 0.0
    instances: set[str] = field(default_factory=set)

    def add(self, table: pa.Table) -> None:
        """Count a table of whole trajectories."""
        import polars as pl

        frame = pl.DataFrame(pl.from_arrow(table))
        absent: dict[str, Any] = {
            "error": pl.String,
            "reward": pl.Float64,
            "rollout_logprobs": pl.List(pl.Float32),
        }
        for name, kind in absent.items():
            if name not in frame.columns:
                frame = frame.with_columns(pl.lit(None, kind).alias(name))
        empty = (pl.col("prompt_token_ids").list.len() == 0) & pl.col("error").is_not_null()
        self.num_calls += frame.filter(~empty)["source"].n_unique()
        self.num_rows += len(frame)
        self.num_without_logprobs += frame.filter(~empty)["rollout_logprobs"].null_count()
        last = frame.filter("is_last_step")
        healthy = last.filter(pl.col("error").is_null())
        self.num_trajectories += len(last)
        self.num_failed += len(last) - len(healthy)
        self.num_without_reward += healthy["reward"].null_count()
        self.reward_sum += float(healthy["reward"].sum())
        self.instances |= set(last["instance_id"])

    @property
    def reward_mean(self) -> float | None:
        """Mean outcome of the trajectories that have one; None if there is none."""
        count = self.num_trajectories - self.num_failed - self.num_without_reward
        return self.reward_sum / count if count else None

    def to_dict(self) -> dict[str, int | float | None]:
        """For `--json`."""
        return {
            "num_calls": self.num_calls,
            "num_rows": self.num_rows,
            "num_trajectories": self.num_trajectories,
            "num_groups": len(self.instances),
            "reward_mean": self.reward_mean,
            "num_without_reward": self.num_without_reward,
            "num_failed": self.num_failed,
            "num_without_logprobs": self.num_without_logprobs,
        }

    def text(self, out: str) -> str:
        """For people, one or two lines."""
        mean = "no rewards" if self.reward_mean is None else f"mean reward {self.reward_mean:g}"
        lines = [
            f"{self.num_calls} calls -> {out}: {self.num_rows} rows, {self.num_trajectories} "
            f"trajectories, {len(self.instances)} groups, {mean}"
        ]
        if self.num_without_reward:
            lines.append(f"{self.num_without_reward} trajectories without a reward (null)")
        if self.num_without_logprobs:
            lines.append(
                f"{self.num_without_logprobs} rows without log-probabilities: no importance "
                'correction in training (ask the engine for "logprobs": true)'
            )
        if self.num_failed:
            lines.append(f"{self.num_failed} failed trajectories, kept with their `error`")
        return "\n".join(lines)
