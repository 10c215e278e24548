"""Preference pairs at exact forks, and labels of single samples, from returns."""

from __future__ import annotations

import polars as pl

from pipelines.rewards import are_equal, is_above, is_best
from rollout_io.formats.exports import bar_of

_FORK = ["instance_id", "context"]


def forks(steps: pl.DataFrame) -> pl.DataFrame:
    """Find the forks of groups: the same tokens, after which attempts sampled different steps.

    A step's prompt contains all tokens before it. Two attempts whose prompts are equal, token for
    token, differ in what the policy sampled next, and in nothing else: other observations make
    other prompts, which are no fork. A step forks as a whole, even if its first tokens agree: the
    prompt then ends where a message begins.

    The value of a branch is the mean return of the attempts that took it, an estimate of the
    expected return after that step. The best branch becomes `chosen`, the worst `rejected` (ties:
    the first). An attempt that took several branches of a fork (by sub-agents, or several samples
    for one prompt) is ignored there, because its return belongs to all of them.

    Args:
        steps: From `index_steps`, with `return` (null or NaN: unknown); steps that do not train and
            steps without a return are ignored.

    Returns:
        A row per fork, in the order of first appearance: instance_id, context, num_branches,
        is_equal (the values differ at most by rounding: no preference), and structs `chosen` and
        `rejected` {row, step, trajectory_id, place, num_tokens, is_cut_off, return (of the branch)}.

    Example:
        After [1, 2], attempts with returns 1, 0 and 0 sampled [3], [3] and [4]: branch [3] has
        value 0.5 and is chosen, branch [4] has value 0 and is rejected.
    """
    scored = steps.filter("trains", pl.col("return").is_not_null() & pl.col("return").is_finite())
    taken = scored.unique([*_FORK, "trajectory_id", "sampled"], keep="first", maintain_order=True)
    once = pl.len().over([*_FORK, "trajectory_id"]) == 1
    several = pl.col("sampled").n_unique().over(_FORK) > 1
    first = pl.col("row", "step", "trajectory_id", "place", "num_tokens", "is_cut_off").first()
    branches = (
        taken.filter(once)
        .filter(several)
        .group_by([*_FORK, "sampled"], maintain_order=True)
        .agg(first, pl.col("return").mean())
    )
    branch, value = pl.struct(pl.exclude(*_FORK, "sampled")), pl.col("return")
    return branches.group_by(_FORK, maintain_order=True).agg(
        num_branches=pl.len(),
        is_equal=are_equal(value),
        chosen=branch.get(value.arg_max()),
        rejected=branch.get(value.arg_min()),
    )


def _best_and_worst(steps: pl.DataFrame) -> pl.DataFrame:
    """Keep the steps of two attempts per group: the highest and the lowest return (ties: the first)."""
    scored = steps.filter(pl.col("return").is_not_null() & pl.col("return").is_finite())
    value, name = pl.col("return"), pl.col("trajectory_id")
    ends = scored.group_by("instance_id", maintain_order=True).agg(
        trajectory_id=pl.concat_list(name.get(value.arg_max()), name.get(value.arg_min()))
    )
    return steps.join(
        ends.explode("trajectory_id"), on=["instance_id", "trajectory_id"], how="semi"
    )


def pairs(steps: pl.DataFrame, select: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Choose preference pairs.

    Args:
        steps: As for `forks`.
        select: `forks`: a pair for each fork of a group. `best_worst`: a pair for each group, at
            the fork where its best and its worst attempt part.

    Returns:
        All forks, and those of them that give a pair.
    """
    if select == "best_worst":
        candidates = forks(_best_and_worst(steps))
        places = [pl.col(side).struct.field("place") for side in ("chosen", "rejected")]
        place = pl.min_horizontal(places)  # rows are ordered by their last step
        is_first = place == place.min().over("instance_id")
        return candidates, candidates.filter(~pl.col("is_equal"), is_first).unique(
            "instance_id", keep="first", maintain_order=True
        )
    candidates = forks(steps)
    return candidates, candidates.filter(~pl.col("is_equal"))


UNKNOWN = "with an unknown return"

_known = pl.when(pl.col("return").is_finite()).then("return")
_unknown = pl.when(_known.is_null()).then(pl.lit(UNKNOWN))


def selected(returns: pl.DataFrame, select: str) -> pl.DataFrame:
    """Choose trajectories to imitate by their returns.

    Args:
        returns: instance_id, trajectory_id, return of the trajectories that may be chosen.
        select: `all`: every trajectory, whatever its return. `best`: the highest return of each
            group (ties: the first). `best_passing`: the same, if it is above 0. `>=X`: returns of
            at least X.

    Returns:
        The trajectories with `reason` (null if chosen, else why not) and `label` (true).

    Example:
        >>> selected(returns, ">=0.5").select("reason").to_series().to_list()
        [None, 'with a return below 0.5', 'with an unknown return']
    """
    reason: pl.Expr = pl.lit(None, pl.String)
    bar = bar_of(select)
    if bar is not None:
        reason = _unknown.when(is_above(pl.lit(bar), _known)).then(
            pl.lit(f"with a return below {bar:g}")
        )
    elif select in {"best", "best_passing"}:
        others = pl.lit("of attempts that are not the best of their group")
        reason = _unknown.when(~is_best()).then(others)
        if select == "best_passing":
            reason = reason.when(_known <= 0).then(pl.lit("of groups that no attempt passed"))
    return returns.with_columns(reason=reason, label=pl.lit(value=True))


def labelled(returns: pl.DataFrame, select: str) -> pl.DataFrame:
    """Label trajectories as desirable or not by their returns.

    Args:
        returns: As for `selected`.
        select: `mean`: desirable if above the mean of the group; groups whose returns do not differ
            are left out. `>=X`: desirable if at least X.

    Returns:
        The trajectories with `reason` (null unless left out) and `label` (true if desirable).

    Example:
        >>> labelled(returns, ">=0.5").select("label").to_series().to_list()
        [True, False, False]
    """
    bar = bar_of(select)
    if bar is None:
        label = is_above(_known, _known.mean().over("instance_id"))
        differ = (~are_equal(_known) & (_known.count() > 1)).over("instance_id")
        reason: pl.Expr = _unknown.when(~differ).then(
            pl.lit("of groups whose returns do not differ")
        )
    else:
        label = ~is_above(pl.lit(bar), _known)
        reason = _unknown.otherwise(pl.lit(None, pl.String))
    return returns.with_columns(reason=reason, label=label.fill_null(value=False))
