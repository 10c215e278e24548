"""A user column may have any name that Arrow takes, and every verb keeps its values."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import pipelines
import rollout_io
from rollout_io.cli.main import run
from schemas.columns import COLUMN_BY_NAME
from schemas.types import PREFIX_TYPES
from tests.helpers.examples import examples

VALUES = [1000, 1001, 1002]
OURS = {*COLUMN_BY_NAME, *PREFIX_TYPES}
PATHS = [
    ".",
    ".a.b",
    "../x",
    ".length",
    "[0]",
    "[0].a",
    "a.b",
    "*",
    "^.*$",
    "a/b",
    "segments.length",
]
PATHS += [
    "response_ids.list.element",
    "column.length",
    "start",
    "key",
    "return",
    "position in the mixture",
]
NAMES = st.one_of(
    st.sampled_from(PATHS),
    st.text(st.sampled_from(".[]0aé^$*/\"'\\ {}%:"), min_size=1, max_size=6),
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8
    ),
).filter(lambda name: name not in OURS)


@pytest.fixture(scope="module")
def steps():
    """Three steps of one trajectory, each of which continues the one before it."""
    table = {
        "instance_id": ["a"] * 3,
        "repetition_id": pa.array([0] * 3, pa.int32()),
        "trajectory_id": ["a_0"] * 3,
        "step_index": pa.array([0, 1, 2], pa.int32()),
        "is_last_step": [False, False, True],
        "prompt_token_ids": pa.array([[1], [1, 2], [1, 2, 3]], pa.list_(pa.int32())),
        "response_ids": pa.array([[2], [3], [4]], pa.list_(pa.int32())),
        "loss_mask": [[True]] * 3,
        "rollout_logprobs": pa.array([[-0.5]] * 3, pa.list_(pa.float32())),
        "reward": [0.0, 0.0, 1.0],
        "token_source": ["engine"] * 3,
    }
    return pa.table(table)


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck), deadline=None)
@given(name=NAMES, layout=st.sampled_from(["prefix", "full"]))
@example(name=".length", layout="prefix")
@example(name="../x", layout="full")
@example(name="*", layout="prefix")
@example(name="^.*$", layout="full")
@example(name="response_ids.list.element", layout="prefix")
@example(name="position in the mixture", layout="prefix")
@pytest.mark.slow
def test_a_column_of_any_name_keeps_its_values_in_every_verb(name, layout, steps):
    with tempfile.TemporaryDirectory() as folder:
        _check(Path(folder), name, layout, steps)


def _check(folder, name, layout, steps):
    given_ds = folder / "ds"
    table = steps.append_column(name, pa.array(VALUES))
    with rollout_io.RolloutWriter(given_ds, layout=layout) as writer:
        writer.write(table)

    def kept(path):
        return rollout_io.read(path)[name].to_pylist()

    assert kept(given_ds) == VALUES
    assert rollout_io.read(given_ds, [name]).column_names == [name]
    assert rollout_io.scan(given_ds).collect()[name].to_list() == VALUES
    for line in (
        f"validate {given_ds}",
        f"stats {given_ds}",
        f"inspect {given_ds}",
        f"drift {given_ds}",
        f"merge {given_ds} --out {folder / 'merged'}",
        f"merge --undo {folder / 'merged'} --out {folder / 'steps'}",
        f"filter {given_ds} --where step_index>=0 --out {folder / 'filtered'}",
        f"filter {given_ds} --where step_index>=0 --prefix-names --out {folder / 'mixed'}",
        f"export {given_ds} --format parquet --out {folder / 'parquet'}",
        f"export {given_ds} --format hf --out {folder / 'hf'}",
    ):
        assert run(line.split()) == 0, line
    for out in ("steps", "filtered", "mixed", "parquet", "hf/data"):
        assert kept(folder / out) == VALUES, out
    frame = rollout_io.scan(given_ds)
    assert rollout_io.read(folder / "merged").num_rows == 1
    assert pipelines.place_rewards(frame).collect()[name].to_list() == VALUES
