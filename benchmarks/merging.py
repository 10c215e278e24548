"""Our merge against a merge of the same rule on Python lists, on 20 million tokens in Arrow.

The list merge is given its lists for free in the first line, and converts from Arrow and back in the
second, as a pipeline whose data is in Arrow has to.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from benchmarks.synthetic import best_of, growing_trajectories, num_tokens
from pipelines.merging import merge_table

COLUMNS = ("trajectory_id", "prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs")
Row = dict[str, Any]


def main() -> None:
    table = growing_trajectories(num_trajectories=600, num_turns=10, tokens_per_turn=640)
    tokens = num_tokens(table)
    print(f"{table.num_rows:,} steps, {tokens / 1e6:.1f} M tokens\n")
    ours_s, merged = best_of(3, lambda: merge_table(table))
    rows = table.select(COLUMNS).to_pylist()
    lists_s, by_lists = best_of(3, lambda: merge_lists(rows))
    arrow_s, _ = best_of(1, lambda: from_lists(merge_lists(table.select(COLUMNS).to_pylist())))
    assert merged.select(COLUMNS).to_pylist() == by_lists, "the two merges differ"

    print(f"{'':34}{'s':>9}{'M tokens/s':>13}{'ours is':>10}")
    for name, seconds in (
        ("ours, Arrow to Arrow", ours_s),
        ("lists, lists to lists", lists_s),
        ("lists, Arrow to Arrow", arrow_s),
    ):
        print(f"{name:34}{seconds:9.3f}{tokens / seconds / 1e6:13.1f}{seconds / ours_s:9.1f}x")


def merge_lists(rows: list[Row]) -> list[Row]:
    """Greedy merge, one row after the other; new lists, the given ones stay."""
    merged: list[Row] = []
    for row in rows:
        if merged and extends(merged[-1], row):
            append(merged[-1], row)
        else:
            merged.append({name: v[:] if isinstance(v, list) else v for name, v in row.items()})
    return merged


def extends(merged: Row, row: Row) -> bool:
    if merged["trajectory_id"] != row["trajectory_id"]:
        return False
    full = merged["prompt_token_ids"] + merged["response_ids"]
    return row["prompt_token_ids"][: len(full)] == full


def append(merged: Row, row: Row) -> None:
    known = len(merged["prompt_token_ids"]) + len(merged["response_ids"])
    observed = row["prompt_token_ids"][known:]
    merged["response_ids"] += observed + row["response_ids"]
    merged["loss_mask"] += [False] * len(observed) + row["loss_mask"]
    merged["rollout_logprobs"] += [0.0] * len(observed) + row["rollout_logprobs"]


def from_lists(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows)


if __name__ == "__main__":
    main()
