"""What a dataset holds, in numbers: rows, trajectories, groups, tokens, rewards."""

from __future__ import annotations

from typing import Any

import polars as pl

from pipelines.rewards import Outcome, trajectory_returns
from pipelines.tables import Frame, as_lazy


def dataset_statistics(frame: Frame, outcome: Outcome = "last") -> dict[str, Any]:
    """Counts and means of a rollout table; per row and per trajectory clearly apart.

    Rewards are those of trajectories (see `trajectory_returns`); failed trajectories and unknown
    outcomes are counted and enter no mean. A group has reward variance where two of its known
    returns differ.

    Returns:
        num_rows, num_trajectories, num_groups, num_failed, num_unknown_reward, num_tokens
        (prompt + response), num_trained_tokens, num_rows_without_logprobs, rows_per_trajectory_{mean,max}, prompt and
        response tokens per row {mean,max}, reward_{mean,min,max}, num_groups_with_variance,
        stop_reasons.
    """
    frame = as_lazy(frame)
    rows = _rows(frame)
    return rows | _returns(trajectory_returns(frame, outcome).collect()) | _stop_reasons(frame)


def _rows(frame: pl.LazyFrame) -> dict[str, Any]:
    prompt, response = (pl.col(n).list.len() for n in ("prompt_token_ids", "response_ids"))
    per_row = frame.select(
        "trajectory_id",
        prompt=prompt.cast(pl.Int64),
        response=response.cast(pl.Int64),
        trained=pl.col("loss_mask").list.sum().cast(pl.Int64),
        without_logprobs=_without_logprobs(frame) & (response > 0),
    ).collect()
    steps = per_row.group_by("trajectory_id").len()["len"]
    return {
        "num_rows": len(per_row),
        "num_tokens": int(per_row["prompt"].sum()) + int(per_row["response"].sum()),
        "num_prompt_tokens": int(per_row["prompt"].sum()),
        "num_response_tokens": int(per_row["response"].sum()),
        "num_trained_tokens": int(per_row["trained"].sum()),
        "num_rows_without_logprobs": int(per_row["without_logprobs"].sum()),
        "rows_per_trajectory_mean": steps.mean(),
        "rows_per_trajectory_max": steps.max(),
        "prompt_tokens_per_row_mean": per_row["prompt"].mean(),
        "prompt_tokens_per_row_max": per_row["prompt"].max(),
        "response_tokens_per_row_mean": per_row["response"].mean(),
        "response_tokens_per_row_max": per_row["response"].max(),
    }


def _without_logprobs(frame: pl.LazyFrame) -> pl.Expr:
    if "rollout_logprobs" not in frame.collect_schema():
        return pl.lit(value=True)
    return pl.col("rollout_logprobs").is_null()


def _returns(returns: pl.DataFrame) -> dict[str, Any]:
    failed = returns["error"].is_not_null()
    value = returns["return"]
    spread = returns.group_by("instance_id").agg(
        (pl.col("return").max() - pl.col("return").min()).alias("spread")
    )
    return {
        "num_trajectories": len(returns),
        "num_groups": len(spread),
        "num_groups_with_variance": int((spread["spread"] > 0).sum()),
        "num_failed": int(failed.sum()),
        "num_unknown_reward": int((value.is_null() & ~failed).sum()),
        "reward_mean": value.mean(),
        "reward_min": value.min(),
        "reward_max": value.max(),
    }


def _stop_reasons(frame: pl.LazyFrame) -> dict[str, Any]:
    if "stop_reason" not in frame.collect_schema():
        return {"stop_reasons": {}}
    counts = (
        frame.group_by("stop_reason").len().sort("len", "stop_reason", descending=True).collect()
    )
    return {"stop_reasons": {str(reason): count for reason, count in counts.rows()}}
