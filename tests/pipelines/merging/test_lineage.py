"""`continued_rows` against its rule spelled out, on trajectories that fork in every way."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.drift_diagnosis import diagnose
from pipelines.merging.lineage import Ancestry, continued_rows, prefix_tree
from rollout_io.dataset.prefix_layout import encode_prefixes
from tests.helpers.examples import examples
from tests.rollout_io.dataset.test_prefix import SHAPES, num_calls, trajectories


def table_of(several, keys=None):
    """Trajectories (lists of steps) as a table; `keys` are the rows' temperatures."""
    steps = [step for one in several for step in one]
    number = [i for i, one in enumerate(several) for _ in one]
    tokens = pa.list_(pa.int32())
    return pa.table(
        {
            "trajectory_id": pa.array([f"a_{i}" for i in number], pa.string()),
            "step_index": pa.array([i for one in several for i in range(len(one))], pa.int32()),
            "prompt_token_ids": pa.array([prompt for prompt, _ in steps], tokens),
            "response_ids": pa.array([response for _, response in steps], tokens),
            "temperature": pa.array(keys or [0] * len(steps), pa.float32()),
        }
    )


def literal_continued(table, rule):
    """In its turn each row continues the longest, of these the latest, row that is open."""
    rows, found = table.to_pylist(), []
    alone = {row["trajectory_id"] for row in rows if not row["response_ids"]}
    for index, row in enumerate(rows):
        nearby = rule == "consecutive" or row["trajectory_id"] in alone
        whole = {
            at: rows[at]["prompt_token_ids"] + rows[at]["response_ids"]
            for at in range(index - 1 if nearby else 0, index)
            if at >= 0
            and at not in found
            and rows[at]["trajectory_id"] == row["trajectory_id"]
            and rows[at]["temperature"] == row["temperature"]
            and rows[at]["response_ids"]
            and row["response_ids"]
        }
        prompt = row["prompt_token_ids"]
        fits = [at for at, tokens in whole.items() if prompt[: len(tokens)] == tokens]
        found.append(max(fits, key=lambda at: (len(whole[at]), at), default=-1))
    return found


def sampled(steps):
    """The steps with a response each, so that none stays alone."""
    return [(prompt, response or [1]) for prompt, response in steps]


@given(
    st.lists(trajectories().map(sampled) | trajectories(), min_size=1, max_size=2),
    st.sampled_from(["lineage", "consecutive"]),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=examples(120))
def test_rows_continue_those_that_the_rule_tells(several, rule, encoded, data):
    num_rows = sum(map(len, several))
    keys = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=num_rows, max_size=num_rows)
    table = table_of(several, data.draw(keys))
    found = continued_rows(encode_prefixes(table) if encoded else table, rule)
    assert found.tolist() == literal_continued(table, rule)


@given(st.lists(trajectories(), min_size=1, max_size=2), st.data())
@settings(deadline=None, max_examples=examples(80))
def test_ancestors_are_those_that_a_walk_up_the_tree_meets(several, data):
    tree = prefix_tree(table_of(several))
    length = tree.prompt + tree.response
    ancestry = Ancestry(tree)

    def whole(row, num_tokens):
        while row >= 0 and length[row] > num_tokens:
            num_tokens, row = min(num_tokens, tree.shared[row]), tree.parent[row]
        return row

    def holder(row):
        stop = tree.shared[row]
        while tree.shared[row] >= stop and tree.parent[row] >= 0:
            row = tree.parent[row]
        return row

    rows = range(len(length))
    assert ancestry.holder.tolist() == [holder(row) for row in rows]
    assert ancestry.whole.tolist() == [whole(tree.parent[r], tree.shared[r]) for r in rows]
    within = [data.draw(st.integers(0, int(n))) for n in length]
    found = ancestry.whole_within(np.arange(len(length)), np.array(within))
    assert found.tolist() == [whole(row, n) for row, n in enumerate(within)]


@pytest.mark.parametrize("rule", ["lineage", "consecutive"])
@pytest.mark.parametrize("shape", SHAPES)
def test_regular_shapes_continue_as_the_rule_tells(shape, rule):
    table = table_of([sampled(SHAPES[shape](100))])
    for one in (table, encode_prefixes(table)):
        assert continued_rows(one, rule).tolist() == literal_continued(table, rule)


def test_a_fork_in_a_trajectory_leaves_its_consecutive_steps_joined():
    steps = [([1], [2]), ([7], [8]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6])]
    assert continued_rows(table_of([steps]), "consecutive").tolist() == [-1, -1, -1, 2]
    assert continued_rows(table_of([steps]), "lineage").tolist() == [-1, -1, 0, 2]


def closed_chain(n):
    """A chain, and as many steps again that branch off its end."""
    half = n // 2
    steps = [([7] * 2 * i, [7]) for i in range(1, half + 1)]
    return [*steps, *(([7] * (n + 2) + [8 + i], [9]) for i in range(half))]


def repeating_chain(n):
    """The same of prompts that add nothing."""
    steps = [([7] * i, [7]) for i in range(1, n // 2 + 1)]
    return [*steps, *(([7] * (n // 2 + 1), [8 + i]) for i in range(n // 2))]


CASES = {name: (shape, continued_rows) for name, shape in SHAPES.items()}
CASES["closed chain"] = (closed_chain, continued_rows)
CASES["repeating chain"] = (repeating_chain, continued_rows)
CASES |= {f"drift, {name}": (SHAPES[name], diagnose) for name in ("star", "caterpillar")}


@pytest.mark.parametrize(("shape", "function"), CASES.values(), ids=CASES)
def test_the_calls_that_a_table_takes_grow_as_its_steps(shape, function):
    tables = [encode_prefixes(table_of([sampled(shape(n))])) for n in (128, 1024)]
    function(tables[0])  # imports
    few, many = (num_calls(function, table) for table in tables)
    assert many < 8 * 2 * few
