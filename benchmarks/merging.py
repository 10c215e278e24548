"""Compare our merge and checks with SkyRL's, on 20 million tokens of multi-turn steps.

    python -m benchmarks.merging [--skyrl PYTHON | --scaling | --polars]

PYTHON is the interpreter of an environment with SkyRL (see skyrl_merging.py). Without it, SkyRL is
replaced by a merge on Python lists with the same rule. Both sides start and end with Arrow tables.
The parts of SkyRL's time are listed separately, to distinguish conversion to lists from merging;
`alone` is its merge without conversions.

Two columns follow each figure. `limit` is the time to move its input and output once, in memory
that is already mapped. `reached` is the limit divided by our time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.synthetic import best_of, growing_trajectories, num_tokens
from pipelines.merging.lineage import continued_rows, prefix_tree
from pipelines.merging.merge import merge_table
from rollout_io.dataset.prefix_layout import encode_prefixes
from schemas import check

COLUMNS = ("trajectory_id", "prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs")
TOKENS = COLUMNS[1:3]
Row = dict[str, Any]
Figures = dict[str, tuple[float, float]]
"""Duration and limit of each operation, in seconds, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skyrl", metavar="PYTHON")
    parser.add_argument(
        "--scaling", action="store_true", help="only measure how merging scales with size"
    )
    parser.add_argument(
        "--polars", action="store_true", help="only compare with the same work as expressions"
    )
    arguments = parser.parse_args()
    if arguments.polars:
        expressions()
        return
    if arguments.scaling:
        scaling()
        return
    table = growing_trajectories(num_trajectories=600, num_turns=10, tokens_per_turn=640)
    print(f"{table.num_rows:,} steps, {num_tokens(table) / 1e6:.1f} M tokens\n")
    merged, ours = measured(table)
    against = (
        of_skyrl(arguments.skyrl, table, merged) if arguments.skyrl else of_lists(table, merged)
    )
    show(ours, against)


def measured(table: pa.Table) -> tuple[pa.Table, Figures]:
    """Time each operation of this library on a table; return the merged table and the figures."""
    stored = encode_prefixes(table)
    prefix_s, merged = best_of(20, lambda: merge_table(stored, "consecutive"))
    lineage_s, same = best_of(20, lambda: merge_table(stored))
    full_s, also = best_of(5, lambda: merge_table(table, "consecutive"))
    for other in (same, also):
        assert all(merged.column(n).equals(other.column(n)) for n in merged.column_names)
    check_prefix_s, _ = best_of(5, lambda: check(stored))
    check_full_s, _ = best_of(5, lambda: check(table))
    of_prefix, of_full = limit(stored.nbytes, merged.nbytes), limit(table.nbytes, merged.nbytes)
    return merged, {
        "merge, from prefix layout": (prefix_s, of_prefix),
        "merge by lineage, from prefix layout": (lineage_s, of_prefix),
        "merge, from full prompts": (full_s, of_full),
        "check every rule, prefix layout": (check_prefix_s, limit(stored.nbytes)),
        "check every rule, full prompts": (check_full_s, limit(table.nbytes)),
    }


def limit(num_read: int, num_written: int = 0) -> float:
    """Return the seconds to read and write these bytes once, in memory that is already mapped."""
    source, target = np.ones(num_read // 8, np.int64), np.ones(num_written // 8, np.int64)
    both = min(len(source), len(target))

    def move() -> None:
        np.copyto(target[:both], source[:both])
        target[both:] = 0
        source[both:].sum()

    return best_of(20, move)[0]


def of_skyrl(python: str, table: pa.Table, merged: pa.Table) -> dict[str, float]:
    """Time SkyRL's merge and validation on the same rows, with the interpreter `python`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.parquet"
        pq.write_table(table, path)
        script = Path(__file__).with_name("skyrl_merging.py")
        done = subprocess.run(
            [python, str(script), str(path)], check=True, capture_output=True, text=True
        )
        theirs = pq.read_table(path.with_suffix(".merged.parquet"))
    for name in TOKENS:
        assert theirs.column(name).to_pylist() == merged.column(name).to_pylist(), name
    seconds = json.loads(done.stdout.splitlines()[-1])
    whole = seconds["from_arrow"] + seconds["merge"] + seconds["to_arrow"]
    parts = {f"  of which {name}": seconds[name] for name in ("from_arrow", "merge", "to_arrow")}
    return {"merge": whole, **parts, "validate": seconds["validate"]}


def of_lists(table: pa.Table, merged: pa.Table) -> dict[str, float]:
    """Time a merge of the same rows as Python lists, including conversion from and to Arrow."""
    from_s, rows = best_of(1, lambda: table.select(COLUMNS).to_pylist())
    merge_s, by_lists = best_of(3, lambda: merge_lists(rows))
    to_s, _ = best_of(1, lambda: pa.Table.from_pylist(by_lists))
    assert merged.select(COLUMNS).to_pylist() == by_lists, "the two merges differ"
    parts = {
        "  of which from_arrow": from_s,
        "  of which merge": merge_s,
        "  of which to_arrow": to_s,
    }
    return {"merge": from_s + merge_s + to_s, **parts}


def show(ours: Figures, against: dict[str, float]) -> None:
    print(f"{'':40}{'ms':>9}{'limit':>9}{'reached':>9}{'reference / ours':>18}{'alone / ours':>14}")
    for name, (seconds, least) in ours.items():
        line = f"{name:40}{seconds * 1e3:9.1f}{least * 1e3:9.1f}{least / seconds:9.0%}"
        bases = ("merge", "  of which merge") if name.startswith("merge") else ("validate",)
        ratios = [f"{against[base] / seconds:.1f}x" for base in bases if base in against]
        print(line + "".join(f"{r:>{w}}" for r, w in zip(ratios, (18, 14), strict=False)))
    for name, seconds in against.items():
        print(f"{'reference: ' + name:40}{seconds * 1e3:9.1f}")


def scaling() -> None:
    """Print the merge time for three sizes; the time per distinct token should be constant."""
    print(f"{'trajectories':>13}{'step tokens':>14}{'distinct':>12}{'ms':>9}{'ns / distinct':>15}")
    for num in (300, 600, 1200):
        stored = encode_prefixes(growing_trajectories(num, num_turns=10, tokens_per_turn=640))
        distinct = num * 10 * 640
        seconds, _ = best_of(5, lambda stored=stored: merge_table(stored))
        per_token = seconds / distinct * 1e9
        print(f"{num:13,}{distinct * 5:14,}{distinct:12,}{seconds * 1e3:9.1f}{per_token:15.2f}")


def expressions() -> None:
    """Print how much longer Polars expressions take than our arrays, on steps in a line."""
    table = growing_trajectories(num_trajectories=600, num_turns=10, tokens_per_turn=640)
    merged, frame = merge_table(table), as_frame(table.select(COLUMNS))
    prompt, response, id_ = (pl.col(name) for name in (*TOKENS, COLUMNS[0]))
    whole = pl.concat_list(prompt, response)
    num_before = whole.list.len().shift(1).over(id_)
    same_tokens = whole.shift(1).over(id_) == prompt.list.head(num_before)
    same_hash = whole.hash().shift(1).over(id_) == prompt.list.head(num_before).hash()

    def sequences(continues: pl.Expr) -> pl.Series:
        return frame.select((~continues.fill_null(False)).cum_sum()).to_series()

    def joined() -> pl.DataFrame:
        num_known = num_before.fill_null(0)
        observed = pl.when(num_known > 0).then(prompt.list.slice(num_known)).otherwise([])
        num = observed.list.len()
        zeros = pl.lit(0.0, pl.Float32).repeat_by(num)
        columns = {
            "response_ids": pl.concat_list(observed, response),
            "loss_mask": pl.concat_list(pl.lit(False).repeat_by(num), "loss_mask"),
            "rollout_logprobs": pl.concat_list(zeros, "rollout_logprobs"),
        }
        rows = frame.with_columns(sequence=sequence, **columns).group_by(
            "sequence", maintain_order=True
        )
        return rows.agg(prompt.first(), *(pl.col(name).explode() for name in columns))

    tree_s, tree = best_of(20, lambda: prefix_tree(table))
    lineage_s = tree_s + best_of(20, lambda: continued_rows(table, "consecutive", tree))[0]
    joining_s = best_of(10, lambda: merge_table(table, "consecutive"))[0] - lineage_s
    tokens_s, sequence = best_of(5, lambda: sequences(same_tokens))
    hashes_s, by_hash = best_of(5, lambda: sequences(same_hash))
    joined_s, rows = best_of(5, joined)
    assert sequence.equals(by_hash), "hashes and tokens give the same sequences"
    for name in ("response_ids", "loss_mask", "rollout_logprobs"):
        assert rows[name].to_list() == merged.column(name).to_pylist(), name
    print(f"{'':52}{'expressions ms':>15}{'arrays ms':>11}{'ratio':>8}")
    for what, theirs, ours in (
        ("which step continues which, by equal tokens", tokens_s, lineage_s),
        ("which step continues which, by hashes of prefixes", hashes_s, lineage_s),
        ("rows of a sequence joined (arrays: all columns)", joined_s, joining_s),
    ):
        print(f"{what:52}{theirs * 1e3:15.1f}{ours * 1e3:11.1f}{theirs / ours:7.1f}x")


def as_frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def merge_lists(rows: list[Row]) -> list[Row]:
    """Merge rows that continue the previous row into that row, without changing the input."""
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


if __name__ == "__main__":
    main()
