"""Log a run to files, trackers and the terminal, with a few of its rollouts as text.

Each start or resumption of a run writes a line to `RUN/starts.jsonl`: the machine, and settings that
may change. Results of floating-point arithmetic depend on the number of threads and on how rows are
packed, among other things, so an update can be replayed under the same conditions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import polars as pl
import pyarrow as pa
import torch
import transformers
from accelerate import Accelerator

import rollout_io
from rollout_io.configuration import flat
from rollout_io.dataset.filesystems import replace_text
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from rollout_io.terminal import Bar
from schemas.errors import count
from trainer.config.sections import SAMPLE_CHARS, SAMPLE_TRACKERS
from trainer.config.train_config import TrainConfig
from trainer.run.messages import Passes, say, ticking, warn
from trainer.run.run import Run
from trainer.run.token_records import write_token_records
from trainer.run.warnings import warnings_about

ZERO_LOSS = 1e-6
"""Absolute value below which a loss is treated as 0."""


class RunLog:
    """Logs the metrics of each mini-batch to `metrics.jsonl`, trackers and `logging`.

    Only the main process has a log. A progress bar is shown if stderr is a terminal; otherwise, one
    line per mini-batch is logged. `passes` shows the progress within an update.

    Args:
        accelerator: Provides the trackers.
        config: Provides the directory and the settings that warnings depend on.
        num_planned: Maximum number of updates.
        num_made: Number of updates before this process started.
        num_iterations: Number of iterations of `rollouts rl`, which logs a line per iteration
            instead of one per mini-batch, and moves the bar with `next_iteration`; None for other
            runs.
        iteration: Number of iterations completed before this process started.

    Attributes:
        passes: Counts the tokens of each pass of an update, and shows the progress.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainConfig,
        *,
        num_planned: int,
        num_made: int = 0,
        num_iterations: int | None = None,
        iteration: int = 0,
    ) -> None:
        self.accelerator, self.config = accelerator, config
        settings = {k: str(v) for k, v in flat(dataclasses.asdict(config)).items()}
        accelerator.init_trackers("rollouts", config=settings)
        self.file = (Path(config.run.out) / "metrics.jsonl").open("a", encoding="utf-8")
        self.num_planned = num_planned
        self.is_loop = num_iterations is not None
        if num_iterations is None:
            self.bar = Bar(num_planned, "updates", done=num_made, stays=True)
        else:
            self.bar = Bar(num_iterations, "iterations", done=iteration, stays=True)
        self.passes = Passes(self.bar, num_planned=num_planned, num_made=num_made)
        self.warned: set[str] = set()
        self.held = ExitStack()

    def __enter__(self) -> Self:
        if not self.bar.is_shown:
            self.held.enter_context(ticking(self.passes))
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()
        self.bar.close()
        self.file.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def write(
        self,
        metrics: dict[str, Any],
        tokens: pa.Table | None = None,
        samples: Sequence[Sample] = (),
    ) -> None:
        """Log the metrics and samples of a mini-batch, and write its token records, if any."""
        if tokens is not None:
            write_token_records(Path(self.config.run.out), metrics["global_step"], tokens)
        self.write_line(metrics)
        for tracker in self.accelerator.trackers if samples else ():
            if tracker.name in SAMPLE_TRACKERS:
                log_samples(tracker, samples, metrics["global_step"])
        if self.bar.is_shown:
            increment = 0 if self.is_loop else 1 - metrics["skipped"]
            self.bar.update(increment, numbers_of(metrics))
        elif not self.is_loop:
            say(progress_line(metrics, self.num_planned))
        if "zero_loss" not in self.warned and abs(metrics["loss"]) < ZERO_LOSS < metrics.get(
            "grad_norm", 0.0
        ):
            self.warned.add("zero_loss")
            say(
                "note: loss 0 is normal here: at probability ratio 1 the loss is minus the mean"
                " advantage, which is 0, but its gradient is not 0 (grad_norm)"
            )
        for subject, text in warnings_about(metrics, self.config).items():
            self.warn_once(subject, f"update {metrics['global_step']}: {text}")

    def warn_once(self, subject: str, text: str) -> None:
        """Log a warning unless the run has warned about its subject before."""
        if subject not in self.warned:
            self.warned.add(subject)
            warn(text)

    def next_iteration(self) -> None:
        """Advance the progress bar of `rollouts rl` by one iteration."""
        self.bar.update(1)

    def write_line(self, metrics: dict[str, Any]) -> None:
        """Write a line of `metrics.jsonl`."""
        self.file.write(line_of(metrics) + "\n")
        self.file.flush()
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        self.accelerator.log(numbers, step=metrics["global_step"])

    def sync(self) -> None:
        """Sync the file to disk, because a checkpoint relies on the lines written before it."""
        os.fsync(self.file.fileno())


def line_of(metrics: Mapping[str, Any]) -> str:
    """Format metrics as JSON; NaN and infinity become null, because JSON supports neither.

    Example:
        >>> line_of({"global_step": 2, "grad_norm": float("inf")})
        '{"global_step": 2, "grad_norm": null}'
    """
    finite = dict(metrics)
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[name] = None
    return json.dumps(finite)


def progress_line(metrics: dict[str, Any], num_planned: int) -> str:
    """Format a mini-batch as one line.

    Example:
        >>> metrics = {"global_step": 2, "loss": -0.0123, "tokens_per_s": 850.4, "seconds": 3.21}
        >>> progress_line(metrics | {"return_mean": 0.5, "skipped": 0}, 6)
        'update 2 of 6: loss -0.0123, return_mean 0.5, 850 tokens/s, 3.2 s'
    """
    if metrics["skipped"]:
        has_tokens = metrics["num_trained_tokens"]
        why = "the gradient is not finite" if has_tokens else "no tokens to train on"
        return f"mini-batch skipped: {why}"
    number = f"update {metrics['global_step']} of {num_planned}"
    return f"{number}: {numbers_of(metrics)}, {metrics['seconds']:.1f} s"


def numbers_of(metrics: dict[str, Any]) -> str:
    """Format the most important metrics."""
    return_mean = metrics["return_mean"]
    shown = "" if return_mean is None else f"return_mean {return_mean:.3g}, "
    return f"loss {metrics['loss']:.4g}, {shown}{metrics['tokens_per_s']:.0f} tokens/s"


SAMPLE_COLUMNS = ("trajectory", "return", "advantage", "prompt", "response")
Sample = tuple[str, float | None, float, str, str]
"""Values of `SAMPLE_COLUMNS`."""

_tokenizer = lru_cache(maxsize=1)(load_tokenizer)


def samples_of(run: Run, groups: Sequence[str], number: int) -> list[Sample]:
    """Return the last step of the first `run.log_samples` trajectories of a mini-batch.

    Of a prompt, the last `SAMPLE_CHARS` characters are kept, and of a response the first. Credentials
    are replaced by their kind. The advantage is 0 if the estimator works per token.

    Args:
        run: The run.
        groups: Groups of the batch.
        number: Number of the mini-batch within the batch.
    """
    is_here = pl.col("instance_id").is_in(list(groups)) & (pl.col("mini_batch") == number)
    planned = run.plan.trajectories.filter(is_here).head(run.config.run.log_samples)
    if planned.is_empty():
        return []
    is_last = pl.col("trajectory_id").is_in(planned["trajectory_id"].to_list()) & pl.col(
        "is_last_step"
    )
    ids = run.rollouts.filter(is_last).select("trajectory_id", "prompt_token_ids", "response_ids")
    rows = planned.join(ids.collect(), on="trajectory_id", maintain_order="left")
    tokenizer = _tokenizer(run.config.model.path, needs_template=False)
    return [
        (
            row["trajectory_id"],
            row["return"],
            row["advantage"],
            _text(tokenizer, row["prompt_token_ids"], keeps_end=True),
            _text(tokenizer, row["response_ids"], keeps_end=False),
        )
        for row in rows.to_dicts()
    ]


def _text(tokenizer: ChatTokenizer, ids: list[int], *, keeps_end: bool) -> str:
    whole = _without_credentials(tokenizer.decode(ids).encode(errors="replace"))
    num_left_out = len(whole) - SAMPLE_CHARS
    if num_left_out <= 0:
        return whole
    marker = f"[{num_left_out:,} characters left out]"
    if keeps_end:
        return f"{marker} {whole[-SAMPLE_CHARS:]}"
    return f"{whole[:SAMPLE_CHARS]} {marker}"


def _without_credentials(text: bytes) -> str:
    from rollout_io.redaction.credentials import credentials  # whose patterns take time to compile

    parts, done = list[bytes](), 0
    for kind, start, end in sorted(credentials(text), key=lambda place: place[1]):
        if end > done:
            parts += [text[done:start], f"[{kind}]".encode()]
            done = end
    return b"".join([*parts, text[done:]]).decode(errors="replace")


def log_samples(tracker: Any, samples: Sequence[Sample], global_step: int) -> None:
    """Log the samples of an update to a tracker of Accelerate, of a kind in `SAMPLE_TRACKERS`."""
    table = "samples"
    if tracker.name == "wandb":
        tracker.log_table(
            table, list(SAMPLE_COLUMNS), [[*sample] for sample in samples], step=global_step
        )
    elif tracker.name == "mlflow":
        import mlflow

        columns = dict(zip(SAMPLE_COLUMNS, map(list, zip(*samples, strict=True)), strict=True))
        mlflow.log_table(columns, f"{table}/update_{global_step}.json", tracker.tracker.info.run_id)
    else:
        for i, (*facts, prompt, response) in enumerate(samples):
            texts = [f"{value}" for value in facts] + [_block(prompt), _block(response)]
            parts = (
                f"**{name}**: {text}" for name, text in zip(SAMPLE_COLUMNS, texts, strict=True)
            )
            tracker.log({f"{table}/{i}": "\n\n".join(parts)}, global_step)


def _block(text: str) -> str:
    """Return Markdown that shows a text as it is."""
    return "\n\n" + "\n".join(f"    {line}" for line in text.splitlines())


STARTS = "starts.jsonl"
MACHINE = ("device", "num_processes", "torch", "transformers")
"""Keys of a line whose values affect the results, besides the number of threads."""
CHANGING = ("tokens_per_micro_batch", "max_row_tokens")
"""Keys of the section `[batch]` that affect updates, and that `--resume` may change."""


def this_machine(accelerator: Accelerator) -> dict[str, Any]:
    """Return the number of threads and processes, the device and software versions, for JSON."""
    device = accelerator.device
    if device.type == "cpu":
        name = f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "num_threads": torch.get_num_threads(),
        "num_processes": accelerator.num_processes,
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rollout_io": rollout_io.__version__,
    }


def record_start(
    out: Path, accelerator: Accelerator, config: TrainConfig, global_step: int
) -> None:
    """Add a line to `starts.jsonl` for a run that starts or resumes after `global_step` updates.

    Existing lines with the same or a larger `global_step` are removed. A note is logged if the
    number of processes differs from the last start's.
    """
    starts, num = starts_of(out), accelerator.num_processes
    before = starts[-1].get("num_processes") if starts else None
    if isinstance(before, int) and before != num:
        here, used = count(num, "process", "es"), count(before, "process", "es")
        say(f"note: training in {here}; the run used {used} so far (--num-processes)")
    lines = [line for line in starts if line["global_step"] < global_step]
    settings = {key: getattr(config.batch, key) for key in CHANGING}
    lines.append({"global_step": global_step} | this_machine(accelerator) | settings)
    replace_text(out / STARTS, "".join(f"{json.dumps(line)}\n" for line in lines))


def starts_of(out: Path) -> list[dict[str, Any]]:
    """Read a run's `starts.jsonl`, ordered by `global_step`; empty if the file cannot be read."""
    file = out / STARTS
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return sorted(lines, key=lambda line: int(line["global_step"]))
    except (OSError, ValueError, TypeError, KeyError):
        return []


def start_of(out: Path, update: int) -> dict[str, Any]:
    """Return the line of `starts.jsonl` for the process that made an update; empty if unknown."""
    before = [line for line in starts_of(out) if line["global_step"] < update]
    return before[-1] if before else {}


def set_threads(start: Mapping[str, Any]) -> None:
    """Set this process's number of threads to the number in a line of `starts.jsonl`, if any."""
    wanted = start.get("num_threads")
    if isinstance(wanted, int) and wanted > 0 and wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)
