"""Where texts are found without a tokenizer, and where two attempts part."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import merge
from pipelines.frames import as_lazy
from pipelines.statistics.attempts import parting, sampled_ranges
from rollout_io import RolloutWriter
from schemas.strategies import rollout_tables
from schemas.types import with_absent
from tests.helpers.examples import examples
from tests.helpers.view_helpers import Asked

SAID = ('He said "naïve"', "a\nb", 'C:\\new "path"')


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Two calls of one trajectory; the second repeats the messages of the first."""
    first = [{"role": "user", "content": SAID[0]}]
    second = [
        *first,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [SAID[1]]},
    ]
    table = pa.table(
        {
            "instance_id": ["t"] * 2,
            "repetition_id": pa.array([0] * 2, pa.int32()),
            "trajectory_id": ["t_0"] * 2,
            "step_index": pa.array([0, 1], pa.int32()),
            "is_last_step": [False, True],
            "prompt_token_ids": pa.array([[1], [1, 2, 3]], pa.list_(pa.int32())),
            "response_ids": pa.array([[2], [4]], pa.list_(pa.int32())),
            "loss_mask": [[True]] * 2,
            "token_source": ["engine"] * 2,
            "messages": [json.dumps(first), json.dumps(second)],  # with ASCII only
            "response_text": ["yes", SAID[2]],
        }
    )
    path = tmp_path_factory.mktemp("texts") / "ds"
    with RolloutWriter(path) as writer:
        writer.write(table)
    return Asked(path)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ('said "naïve"', [0]), ("ïve", [0]), ("a\nb", [1]), ('new "path"', [1]), ("yes", [0]),
        ("role", []), ("\\u00ef", []), ("user", [0]),
    ],
)  # fmt: skip
def test_a_text_is_found_as_it_was_said_in_the_row_that_said_it_first(ask, text, steps):
    found = ask("/api/datasets/d0/search", text=text)
    assert [(hit["step_index"], hit["position"]) for hit in found["hits"]] == [
        (step, None) for step in steps
    ]
    assert found["complete"]


def row(num_prompt, *tokens):
    """A row of an attempt; negative tokens are not sampled."""
    ids = np.array(tokens, np.int32)
    at = np.flatnonzero(ids > 0).tolist()
    return num_prompt, abs(ids), [{"start": start, "length": 1, "step_index": 0} for start in at]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([row(1, 5, 6, 7)], None),
        ([row(1, 5, 6)], None),
        ([row(1, 5, 9, 7)], (0, 2, 0, 2)),
        ([row(1, 5, 6), row(2, -9, 8)], (1, 3, 0, 3)),
        ([row(1, 5, 6), row(2, -9), row(3, -1, 8)], (2, 4, 0, 3)),
        ([row(1, 5, 6), row(2, -9, 7)], None),
        ([row(1, 5, 6, 7), row(2, 8)], (1, 2, None, None)),
        ([row(1, 5, 6), row(2, -9)], None),
    ],
)
def test_attempts_part_at_the_first_other_token_that_was_sampled(other, expected):
    names = ("row", "token", "first_row", "first_token")
    found = parting(sampled_ranges([row(1, 5, 6, 7)]), sampled_ranges(other))
    assert found == (None if expected is None else dict(zip(names, expected, strict=True)))


def ranges_of(table):
    """The sampled ranges of each trajectory."""
    rows = {}
    names = ("trajectory_id", "prompt_token_ids", "response_ids", "segments")
    for line in with_absent(as_lazy(table), ["segments"]).select(names).collect().iter_rows():
        name, prompt, response, segments = line
        rows.setdefault(name, []).append((len(prompt), np.array(response, np.int32), segments))
    return {name: sampled_ranges(own) for name, own in rows.items()}


@settings(deadline=None, max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(rollout_tables(), st.sampled_from(["consecutive", "lineage"]))
def test_an_attempt_never_parts_from_its_merged_copy(table, rule):
    steps, merged = ranges_of(table), ranges_of(merge(table, rule))
    assert steps.keys() == merged.keys()
    for name, own in steps.items():
        assert parting(own, merged[name]) is None
        assert parting(merged[name], own) is None
