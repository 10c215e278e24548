"""A dataset that was changed by hand is refused by every verb, and merge invents nothing for it."""

from typing import Any

import pyarrow as pa
import pytest

from pipelines import merge
from rollout_io import read
from rollout_io.dataset.prefix_layout import trajectory_starts
from schemas.errors import RolloutError
from tests.rollout_io.cli.test_verbs_check import assert_refused, written

Rows = list[dict[str, Any]]


def cut(name):
    return lambda rows: rows[1][name].pop()


def prolong(name):
    return lambda rows: rows[1][name].append(rows[1][name][-1])


def move_20_to_the_next_row(name):
    def change(rows):
        rows[2][name] = rows[1][name][-20:] + rows[2][name]
        del rows[1][name][-20:]

    return change


def lose_a_step(rows):
    del rows[1]


def swap_steps(rows):
    rows[0], rows[1] = rows[1], rows[0]


def set_null(name, *, element):
    def change(rows):
        if element:
            rows[1][name][3] = None
        else:
            rows[1][name] = None

    return change


LISTS = ("rollout_logprobs", "loss_mask")
TAMPERED = {
    **{f"{n} one short": ("lengths_align", cut(n)) for n in LISTS},
    **{f"{n} one long": ("lengths_align", prolong(n)) for n in LISTS},
    **{f"{n} in the next row": ("lengths_align", move_20_to_the_next_row(n)) for n in LISTS},
    "step missing": ("step_index_sequence", lose_a_step),
    "steps swapped": ("step_index_sequence", swap_steps),
}
REQUIRED_LISTS = ("prompt_token_ids", "response_ids", "loss_mask")
NULLS = {
    f"{'null in' if e else 'null'} {n}": set_null(n, element=e)
    for n in REQUIRED_LISTS
    for e in (True, False)
}


@pytest.fixture
def rows(shop_dataset):
    """Two trajectories of a real log."""
    table = read(shop_dataset)
    return table.slice(0, trajectory_starts(table)[2]).to_pylist()


@pytest.fixture
def schema(shop_dataset):
    """One that lets nulls in."""
    return pa.schema([field.with_nullable(True) for field in read(shop_dataset).schema])


@pytest.mark.slow
@pytest.mark.parametrize("name", TAMPERED)
def test_a_dataset_that_was_tampered_with_is_refused_by_every_verb(
    name, rows, schema, tmp_path, capfd
):
    rule, tamper = TAMPERED[name]
    tamper(rows)
    table = pa.Table.from_pylist(rows, schema=schema)
    assert_refused(rule, written(table, tmp_path, 1, "full"), capfd)
    with pytest.raises(RolloutError, match=rule):
        merge(table).collect()


@pytest.mark.slow
@pytest.mark.parametrize("name", NULLS)
def test_nulls_where_none_may_be_are_refused_by_every_verb(name, rows, schema, tmp_path, capfd):
    NULLS[name](rows)
    table = pa.Table.from_pylist(rows, schema=schema)
    assert_refused("columns_and_types", written(table, tmp_path, 1, "full"), capfd)


@pytest.mark.parametrize("column", ["loss_mask", "reward"])
def test_columns_of_the_same_name_are_refused_by_every_verb(column, rows, schema, tmp_path, capfd):
    table = pa.Table.from_pylist(rows, schema=schema)
    table = table.append_column(schema.field(column), table.column(column))
    assert_refused("columns_and_types", written(table, tmp_path, 1, "full"), capfd)


@pytest.mark.parametrize("is_in_a_list", [False, True])
def test_fields_of_the_same_name_are_refused_by_every_verb(
    is_in_a_list, rows, schema, tmp_path, capfd
):
    values = pa.array(range(len(rows)))
    column = pa.StructArray.from_arrays([values, values], names=["x", "x"])
    if is_in_a_list:
        column = pa.ListArray.from_arrays(list(range(len(rows) + 1)), column)
    table = pa.Table.from_pylist(rows, schema=schema).append_column("mine", column)
    assert_refused("columns_and_types", written(table, tmp_path, 1, "full"), capfd)
