"""`rollout_tables` draws each column and each shape that the schema allows."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from schemas.columns import COLUMNS
from schemas.strategies import rollout_tables

SHAPES = {
    "several agents": lambda rows: len({r.get("agent") for r in rows}) > 1,
    "several temperatures": lambda rows: len({r.get("temperature") for r in rows}) > 1,
    "five steps or more": lambda rows: len(rows) > 4,
    "a failure": lambda rows: rows[0].get("error") is not None,
    "no call": lambda rows: not rows[0]["response_ids"],
    "a row that does not train": lambda rows: any(not any(r["loss_mask"]) for r in rows),
    "a picture at a token": lambda rows: any(
        picture["start"] is not None for r in rows for picture in r.get("pictures") or ()
    ),
    "a picture of two steps": lambda rows: any(
        picture in (a.get("pictures") or ()) and picture["start"] is not None
        for a, b in pairwise(rows)
        for picture in b.get("pictures") or ()
    ),
    "metrics": lambda rows: any(r.get("metrics") for r in rows),
    "messages of tools": lambda rows: any(
        json.loads(r["messages"])[-1]["role"] == "tool" for r in rows if r.get("messages")
    ),
    "several segments": lambda rows: any(len(r.get("segments") or ()) > 1 for r in rows),
    "a repeated prompt": lambda rows: len({str(r["prompt_token_ids"]) for r in rows}) < len(rows),
    "a shortened prompt": lambda rows: any(
        len(b["prompt_token_ids"]) < len(a["prompt_token_ids"]) for a, b in pairwise(rows)
    ),
    "an unknown reward": lambda rows: "reward" in rows[-1] and rows[-1]["reward"] is None,
}


@pytest.mark.slow
def test_every_column_and_shape_is_drawn():
    seen, groups = Counter(), Counter()

    @settings(
        max_examples=2_000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(rollout_tables())
    def draw(table):
        rows = table.to_pylist()
        seen.update(n for n in table.column_names if any(r[n] not in (None, []) for r in rows))
        trajectories = {}
        for row in rows:
            trajectories.setdefault(row["trajectory_id"], []).append(row)
        for own in trajectories.values():
            seen.update(name for name, holds in SHAPES.items() if holds(own))
        instances = Counter(own[0]["instance_id"] for own in trajectories.values())
        groups.update(instances.values())

    draw()
    wanted = [*(c.name for c in COLUMNS), "rollout_expert_indices", *SHAPES]
    assert {name: seen[name] for name in wanted if seen[name] < 10} == {}
    assert all(groups[size] for size in (1, 2, 3, 4))
