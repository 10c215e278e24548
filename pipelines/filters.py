"""Built-in filters for `judge`, `apply_filters` and `apply_masks`.

Edge cases:

    failed trajectory (`error` set)   has no return. `where`, the ranges and `stale` treat it like
                                      any other; `zero_variance` and `duplicates` ignore it
    null return, no error             means unknown, not 0: outside every reward range, and ignored
                                      by `zero_variance`
    group of one                      kept by `zero_variance`: its variance is undefined
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.filtering import STEPS, Filter
from pipelines.rewards import are_equal, is_above, is_best
from rollout_io.dataset.storage import PathLike
from rollout_io.dataset.trajectory_conditions import TrajectoryCondition
from rollout_io.dataset.trajectory_facts import Fold
from schemas.columns import PICTURES
from schemas.errors import count
from schemas.ragged import Ragged
from schemas.types import as_table

RAN_OUT_OF_TOKENS = (
    *("length", "max_tokens", "max_output_tokens", "model_length", "truncated"),
    *("context_length", "context_length_exceeded", "model_context_window_exceeded"),
)
"""Stop reasons, in lower case, that mean a response was cut off."""

Tokens = npt.NDArray[np.int32]

_HEALTHY = pl.col("error").is_null()
_GROUP = "instance_id"


def where(condition: str | pl.Expr, dataset: PathLike = "") -> Filter:
    """Keep trajectories that match a condition.

    Null is treated as false, and an optional column missing from the table as null. A merged row is
    treated as one row, with the last step's values.

    Args:
        condition: SQL with `any`, `all` and `last` over the rows of a trajectory, and its `return`
            and `num_turns` (`rollout_io.dataset.trajectory_conditions`); or a Polars expression.
        dataset: Path of the dataset whose findings `findings('NAME')` counts.

    Raises:
        ConfigError: `condition`: the condition is not SQL. `judge` refuses one that some rows of a
            trajectory match and others do not.

    Example:
        >>> where("return > 0 AND any(agent = 'main')")
        >>> where((pl.col("temperature") == 1).all().over("trajectory_id"))
    """
    parsed = TrajectoryCondition.parse(condition, dataset)
    return Filter(name=f"where: {condition}", condition=parsed, drops=~pl.col("value"))


def failed(masks: Literal["group", "trajectory"] = "trajectory") -> Filter:
    """Drop failed trajectories, either on their own or with their entire group.

    The trainer masks with `group` by default (see `trainer.batches.plan`).
    """
    bad = ~_HEALTHY
    if masks == "trajectory":
        return Filter(name="failed", drops=bad)
    return Filter(name="failed group", drops=bad.any().over(_GROUP))


def unknown_return() -> Filter:
    """Drop trajectories that did not fail but have no return: training rejects them."""
    return Filter(name="unknown return", drops=_HEALTHY & pl.col("return").is_null())


def zero_variance() -> Filter:
    """Drop groups whose returns are all equal (to one part in a million): they carry no signal.

    Variance is over trajectories, never over rows. Failed trajectories and unknown returns are
    ignored; a group with fewer than two known returns is kept, because its variance is undefined.
    DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) drops groups with accuracy 0 or 1.

    Example:
        Returns [1, 1] in group a and [1, 0] in group b: drops a, keeps b.
    """
    constant = are_equal(pl.col("return"))
    return Filter(name="zero variance", drops=constant.over(_GROUP))


def dynamic_sampling(num_groups: int | None = None) -> list[Filter]:
    """Build the filters of dynamic sampling: keep at most `num_groups` groups with reward variance.

    `apply_filters` raises if nothing is left.
    """
    return [zero_variance()] + ([] if num_groups is None else [first_groups(num_groups)])


def best_of_group(num: int = 1) -> Filter:
    """Keep the `num` trajectories of each group with the highest returns, even if these are low.

    Unknown returns are dropped (`is_best`). `rollouts export --select best` keeps the same
    trajectories as `best_of_group(1)`.

    Example:
        Returns [0, 1, 1] in group a and [0] in group b: keeps the second of a, and b's.
    """
    return Filter(name=f"best {num} of each group", drops=~is_best(num))


def reward_range(minimum: float | None = None, maximum: float | None = None) -> Filter:
    """Keep trajectories whose return is in a range; null is outside any range.

    Bounds are included, and what differs from them by rounding (`are_equal`).
    """
    return _in_range("reward", pl.col("return"), minimum, maximum)


def pass_rate_range(minimum: float | None = None, maximum: float | None = None) -> Filter:
    """Keep groups whose pass rate is in a range, bounds included: tasks of a chosen difficulty.

        pass rate = attempts with a return > 0 / attempts with a known return

    A group without a known return is outside any range.

    Example:
        Returns [1, 0, 0, null] in group a and [1, 1] in group b:

        >>> judge(frame, [pass_rate_range(maximum=0.5)])["reason"].to_list()
        [None, None, None, None, 'pass rate <= 0.5', 'pass rate <= 0.5']
    """
    rate = is_above(pl.col("return"), 0.0).mean().over(_GROUP)
    return _in_range("pass rate", rate, minimum, maximum)


def token_range(minimum: int | None = None, maximum: int | None = None) -> Filter:
    """Keep trajectories whose longest sequence (prompt + response) has a length in a range."""
    tokens = [pl.col(n).list.len().cast(pl.Int64) for n in ("prompt_token_ids", "response_ids")]
    return _in_range("tokens", pl.col("value"), minimum, maximum, tokens[0] + tokens[1])


def step_range(minimum: int | None = None, maximum: int | None = None) -> Filter:
    """Keep trajectories whose number of steps is in a range, counting every step of merged rows."""
    steps = pl.col(STEPS).list.len().cast(pl.Int64).fill_null(1)
    return _in_range("steps", pl.col("value"), minimum, maximum, steps, pl.Expr.sum)


def stale(policy_version: int, max_staleness: int) -> Filter:
    """Drop trajectories that have a row sampled by weights older than allowed.

        staleness = policy_version - the row's policy_version, the oldest of its tokens

    Only known versions count. A trajectory without any known version is dropped unless it failed.
    """
    oldest = pl.col("value")
    too_old = (oldest < policy_version - max_staleness).fill_null(_HEALTHY)
    name = f"staleness <= {max_staleness}"
    return Filter(name=name, row=pl.col("policy_version"), fold=pl.Expr.min, drops=too_old)


def duplicates(within: Literal["group", "dataset"] = "group") -> Filter:
    """Drop trajectories that repeat an earlier one token for token, whatever their rewards.

    Duplicates have the same steps with the same prompts, pictures and responses. Failed trajectories are
    ignored: they are neither dropped nor compared. Trajectories are compared by 96-bit digests:
    among ten million trajectories, the odds of a false match are 1 in 10^15.

    Args:
        within: Compare trajectories within each group, or across the dataset.
    """
    names = ("prompt_token_ids", "response_ids", PICTURES, STEPS)
    row = pl.struct(names).map_batches(_digests, return_dtype=pl.Int128, is_elementwise=True)
    first = pl.struct(_HEALTHY, "value").is_first_distinct()
    first = first.over(_GROUP) if within == "group" else first
    name = f"duplicate in {within}"
    return Filter(name=name, row=row, fold=pl.Expr.sum, drops=_HEALTHY & ~first)


def overlong(stop_reasons: Collection[str] = RAN_OUT_OF_TOKENS) -> Filter:
    """Drop trajectories whose last step was cut off; used as a mask more often than as a filter.

    This is DAPO's overlong filtering (arXiv:2503.14476, section 3.4). Earlier steps that were cut
    off are ignored.
    """
    cut = pl.col("stop_reason").str.to_lowercase().is_in(list(stop_reasons))
    row = (pl.col("is_last_step") & cut).fill_null(value=False)
    return Filter(name="overlong", row=row, fold=pl.Expr.any, drops=pl.col("value"))


def first_groups(num_groups: int) -> Filter:
    """Keep the first `num_groups` groups in order of appearance, or all if there are fewer."""
    appears = pl.col("position").min().over(_GROUP)
    name = f"first {count(num_groups, 'group')}"
    return Filter(name=name, drops=appears.rank("dense") > num_groups)


def sample_groups(num_groups: int, seed: int = 0) -> Filter:
    """Keep `num_groups` groups drawn at random, or all if there are fewer.

    The draw depends only on a group's id and the seed: it is the same in every subset and version
    of a dataset, and a smaller sample is contained in a larger one.
    """

    def lots(ids: pl.Series) -> pl.Series:
        return pl.Series(ids.name, [lot(text, seed) for text in ids], dtype=pl.UInt64)

    drawn = pl.col(_GROUP).map_batches(lots, return_dtype=pl.UInt64, is_elementwise=True)
    name = f"sample of {count(num_groups, 'group')}"
    return Filter(name=name, drops=drawn.rank("dense") > num_groups)


def lot(instance_id: str, seed: int) -> int:
    """Hash a group id to a number in 0..2^64-1, reproducible across machines and versions."""
    digest = blake2b(f"{seed} {instance_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _in_range(
    name: str,
    value: pl.Expr,
    minimum: float | None,
    maximum: float | None,
    row: pl.Expr | None = None,
    fold: Fold = pl.Expr.max,
) -> Filter:
    low, high = (pl.lit(bound, pl.Float64) for bound in (minimum, maximum))
    # Rounding is an error of rewards and rates, not of the whole numbers that rows have.
    below, above = (
        (is_above(low, value), is_above(value, high))
        if row is None
        else (value < low, value > high)
    )
    limits = [
        *([] if minimum is None else [(f"{name} >= {minimum}", ~below)]),
        *([] if maximum is None else [(f"{name} <= {maximum}", ~above)]),
    ]
    assert limits, "a range needs a minimum or a maximum"
    inside = pl.all_horizontal(test for _, test in limits).fill_null(value=False)
    joined = ", ".join(text for text, _ in limits)
    return Filter(name=joined, row=row, fold=fold, drops=~inside)


def _digests(rows: pl.Series) -> pl.Series:
    """Sum the digests of each row's steps, so that order and merging have no effect."""
    table = as_table(rows.struct.unnest().select("prompt_token_ids", "response_ids"))
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    pictures = rows.struct.field(PICTURES)
    has_pictures = pictures.null_count() < len(pictures)
    spans_of = [_spans(entries) for entries in pictures] if has_pictures else [[]] * len(rows)
    totals = []
    for i, steps in enumerate(rows.struct.field(STEPS).to_list()):
        whole = {"start": 0, "length": len(responses.row(i))}
        spans = ((step["start"], step["length"]) for step in steps or [whole])
        parts = prompts.row(i), responses.row(i), spans_of[i]
        totals.append(sum(_digest(*parts, *span) for span in spans))
    return pl.Series(rows.name, totals, dtype=pl.Int128)


def _spans(entries: pl.Series | None) -> list[tuple[int, str]]:
    """Return the start and the text of each entry of `pictures` that `identity_ids` tells apart."""
    rows = () if entries is None else entries.to_list()
    return [(entry["start"], str(entry)) for entry in rows if None not in entry.values()]


def _digest(
    prompt: Tokens, response: Tokens, pictures: list[tuple[int, str]], start: int, length: int
) -> int:
    """Hash one step of a row; its prompt is everything before response token `start`."""
    # Hash the prompt's length too: the same tokens, split differently, are a different step.
    digest = blake2b((len(prompt) + start).to_bytes(8, "big"), digest_size=12)
    for tokens in (prompt, response[: start + length]):
        digest.update(tokens.astype(np.int32).tobytes())
    end = len(prompt) + start + length
    for text in (text for at, text in pictures if at < end):
        digest.update(text.encode())
    return int.from_bytes(digest.digest(), "big")
