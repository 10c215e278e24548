"""Several groups may attempt one task, which their column `task_instance_id` names."""

import json

import polars as pl
import pytest

from pipelines import merge, messages, mix, unmerge
from pipelines.statistics.attempts import attempts
from pipelines.statistics.grouped import grouped
from rollout_io import RolloutWriter, read, scan, validate
from rollout_io.cli.main import run
from schemas.columns import TASK
from tests.helpers.filter_helpers import ids, one_step, table
from tests.helpers.view_helpers import Asked


def write(path, tasks=None, **groups):
    """Groups with these returns; with `tasks`, the task of each group."""
    rows = pl.from_arrow(
        table(*(x for name, returns in groups.items() for x in one_step(*returns, instance=name)))
    )
    if tasks is not None:
        rows = rows.with_columns(
            pl.col("instance_id").replace_strict(tasks, return_dtype=pl.String).alias(TASK)
        )
    with RolloutWriter(path) as writer:
        writer.write(rows)
    return str(path)


@pytest.fixture
def iterations(tmp_path):
    """Two iterations of a run: `a` is visited once in the first, and three times in the second."""
    first = write(tmp_path / "one", {"a": "a", "b@4": "b@4"}, **{"a": [0.0] * 4, "b@4": [1.0] * 4})
    later = {f"a@{n}": [1.0] * 4 for n in (2, 3, 5)} | {"b@4@2": [1.0] * 4, "b": [0.0] * 4}
    names = {name: "a" for name in later if name.startswith("a")} | {"b@4@2": "b@4", "b": "b"}
    return first, write(tmp_path / "two", names, **later)


def test_visits_of_a_task_are_compared_as_attempts_at_it_and_ids_that_end_in_at_4_stay_apart(
    iterations, capsys
):
    assert run(["diff", *iterations, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {x["instance_id"]: (x["verdict"], x["num_a"], x["num_b"]) for x in told["tasks"]}
    assert found == {"a": ("win", 4, 12), "b@4": ("tie", 4, 4)}
    assert (told["num_only_a"], told["num_only_b"]) == (0, 1)


def test_without_the_column_a_task_is_its_group(tmp_path, capsys):
    groups = {"lodash": [0.0] * 4, "lodash@4": [1.0] * 4}
    a = write(tmp_path / "a", **groups)
    b = write(tmp_path / "b", dict.fromkeys(groups, None), **groups)
    assert run(["diff", a, b, "--json"]) == 0
    assert [x["instance_id"] for x in json.loads(capsys.readouterr().out)["tasks"]] == [*groups]
    assert attempts(scan(b))["instance_id"].unique().sort().to_list() == [*groups]


def test_statistics_and_conditions_read_the_task_of_every_dataset(iterations, tmp_path, capsys):
    lines = grouped(scan(iterations[1]), TASK).select(TASK, "num_trajectories").rows()
    assert lines == [("a", 12), ("b@4", 4), ("b", 4)]
    assert run(["stats", iterations[1], "--by", TASK, "--json"]) == 0
    assert [x[TASK] for x in json.loads(capsys.readouterr().out)] == ["a", "b@4", "b"]
    plain = write(tmp_path / "plain", a=[1.0], b=[0.0])
    for dataset, number in ((iterations[1], 12), (plain, 1)):
        out = str(tmp_path / f"out{number}")
        assert run(["filter", dataset, "--where", f"{TASK} = 'a'", "--out", out]) == 0
        assert len(ids(scan(out))) == number


def test_the_viewer_compares_and_filters_by_task(iterations):
    ask = Asked(*iterations)
    assert [x["shares_tasks_with"] for x in ask("/api/sources")["datasets"]] == ["d1", "d0"]
    found = ask("/api/diff", a="d0", b="d1")
    assert found.select(TASK, "num_a", "num_b").rows() == [("a", 4, 12), ("b@4", 4, 4)]
    pairs = ask("/api/diff/pair", a="d0", b="d1", task="a")["pairs"]
    assert [(x["trajectory_a"], x["trajectory_b"]) for x in pairs] == [
        (f"a_{n}", f"a@2_{n}") for n in range(4)
    ]
    shown = ask("/api/datasets/d1/trajectories", where=f"{TASK} = 'a'")
    assert shown[TASK].to_list() == ["a"] * 12
    assert len(ask("/api/datasets/d1/group", instance_id="a")["attempts"]) == 12
    assert len(ask("/api/datasets/d1/group", instance_id="a@2")["attempts"]) == 4


def test_a_table_whose_tasks_are_its_groups_does_not_list_them_twice(tmp_path):
    ask = Asked(write(tmp_path / "plain", a=[1.0]))
    assert TASK not in ask("/api/datasets/d0/trajectories").columns


def test_merging_and_mixing_keep_the_task(iterations, tmp_path):
    rows = scan(iterations[1])
    merged = merge(rows)
    assert merged.collect()[TASK].to_list() == rows.collect()[TASK].to_list()
    assert unmerge(merged).collect()[TASK].to_list() == rows.collect()[TASK].to_list()
    mixed, _ = mix({"x": scan(iterations[0]), "y": rows}, prefix_names=True)
    assert set(mixed.collect()[TASK]) == {"x/a", "x/b@4", "y/a", "y/b@4", "y/b"}
    with RolloutWriter(tmp_path / "mixed") as writer:
        writer.write(mixed.collect())
    validate(tmp_path / "mixed")
    assert read(tmp_path / "mixed").schema.field(TASK).nullable
    assert len(messages(rows).collect())
