"""Log a few rollouts of each update to trackers, as text beside the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import polars as pl

from rollout_io.redaction.credentials import credentials
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from trainer.config.sections import SAMPLE_CHARS
from trainer.run.run import Run

COLUMNS = ("trajectory", "return", "advantage", "prompt", "response")
Sample = tuple[str, float | None, float, str, str]
"""Values of `COLUMNS`."""

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
        tracker.log_table(table, list(COLUMNS), [[*sample] for sample in samples], step=global_step)
    elif tracker.name == "mlflow":
        import mlflow

        columns = dict(zip(COLUMNS, map(list, zip(*samples, strict=True)), strict=True))
        mlflow.log_table(columns, f"{table}/update_{global_step}.json", tracker.tracker.info.run_id)
    else:
        for i, (*facts, prompt, response) in enumerate(samples):
            texts = [f"{value}" for value in facts] + [_block(prompt), _block(response)]
            parts = (f"**{name}**: {text}" for name, text in zip(COLUMNS, texts, strict=True))
            tracker.log({f"{table}/{i}": "\n\n".join(parts)}, global_step)


def _block(text: str) -> str:
    """Return Markdown that shows a text as it is."""
    return "\n\n" + "\n".join(f"    {line}" for line in text.splitlines())
