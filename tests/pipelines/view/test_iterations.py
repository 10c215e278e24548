"""A run of `rl` has one dataset per iteration, and the same trajectory ids in each of them."""

import json
import shutil

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_io import RolloutWriter, read
from schemas.columns import arrow_schema
from schemas.errors import RolloutError
from schemas.records import token_record_path, token_record_schema
from tests.helpers.findings_helpers import digest_of
from tests.helpers.view_helpers import Asked

RESPONSES = ([5, 6, 7, 8], [9, 9])  # of the attempts in each iteration
ADVANTAGES = (0.5, -0.25)
LINES = (
    {"iteration": 0, "global_step": 0, "evaluation/return_mean": 0.1},
    {"iteration": 0, "global_step": 1, "loss": 0.7, "skipped": 0},
    {"iteration": 1, "global_step": 1, "evaluation/return_mean": 0.2, "eval/all/avg_score": 0.3},
    {"iteration": 1, "global_step": 2, "loss": 0.6, "skipped": 0},
)


def write_dataset(path, response):
    table = pa.table(
        {
            "instance_id": ["t"] * 2,
            "repetition_id": pa.array([0, 1], pa.int32()),
            "trajectory_id": ["t_0", "t_1"],
            "step_index": pa.array([0, 0], pa.int32()),
            "is_last_step": [True] * 2,
            "prompt_token_ids": pa.array([[1, 2]] * 2, pa.list_(pa.int32())),
            "response_ids": pa.array([response] * 2, pa.list_(pa.int32())),
            "loss_mask": [[True] * len(response)] * 2,
            "token_source": ["engine"] * 2,
            "reward": [0.0, 1.0],
        }
    )
    with RolloutWriter(path) as writer:
        writer.write(table)


def write_records(run, update, dataset, response, advantage):
    known = {
        "dataset": [dataset] * 2,
        "instance_id": ["t"] * 2,
        "trajectory_id": ["t_0", "t_1"],
        "step_index": [0, 0],
        "row_digest": [digest_of([1, 2], response, reward) for reward in (0.0, 1.0)],
        "loss_mask": [[True] * len(response)] * 2,
        "advantages": [[advantage] * len(response)] * 2,
        "weights": [[1.0] * len(response)] * 2,
        "losses": [[2.0] * len(response)] * 2,
    }
    schema = token_record_schema()
    arrays = [pa.array(known.get(field.name, [None] * 2), field.type) for field in schema]
    path = token_record_path(run, update)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl") / "run"
    for number, (response, advantage) in enumerate(zip(RESPONSES, ADVANTAGES, strict=True)):
        dataset = folder / "rollouts" / f"iteration_{number:05}"
        write_dataset(dataset, response)
        write_records(folder, number + 1, str(dataset), response, advantage)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return folder


@pytest.fixture(scope="module")
def ask(run):
    return Asked(run)


@pytest.mark.parametrize("iteration", [0, 1])
@pytest.mark.parametrize("update", [1, 2])
def test_an_update_is_joined_only_to_the_rows_that_it_trained(ask, iteration, update):
    advantage = ADVANTAGES[iteration] if update == iteration + 1 else None
    root, of = f"/api/datasets/d{iteration}", {"run": "r0", "update": update}
    tokens = ask(f"{root}/tokens", trajectory_id="t_0", step_index=0, **of)
    expected = [None, None, *[advantage] * len(RESPONSES[iteration])]
    assert tokens["advantage"].to_list() == expected
    attempts = ask(f"{root}/group", instance_id="t", **of)["attempts"]
    assert [attempt["advantage"] for attempt in attempts] == [advantage] * 2
    nodes = ask(f"{root}/tree", instance_id="t", **of)["nodes"]
    assert [node["advantage"] for node in nodes if node["sampled"]] == [advantage]


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_task_and_a_row_know_the_updates_that_recorded_them(ask, iteration):
    """Both iterations have the same ids: only the update of a dataset's own iteration counts."""
    root, wanted = f"/api/datasets/d{iteration}/recorded", [iteration + 1]
    told = {"r0": {"updates": wanted, "unreadable": []}}
    assert ask(root, instance_id="t") == ask(root, trajectory_id="t_1", step_index=0) == told
    assert ask(root, instance_id="other") == {"r0": {"updates": [], "unreadable": []}}


def test_a_run_is_told_from_one_that_samples(run, tmp_path):
    def told(path):
        return Asked(path)("/api/sources")["runs"][0]["samples"]

    assert told(run) is True
    fixed = tmp_path / "fixed"
    fixed.mkdir()
    (fixed / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    assert told(fixed) is None
    dataset = run / "rollouts" / "iteration_00000"
    (fixed / "config.json").write_text(json.dumps({"data": {"dataset": str(dataset)}}))
    assert told(fixed) is False


def test_updates_are_told_as_they_are_written_and_if_they_are_damaged(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    dataset = str(copy / "rollouts" / "iteration_00001")
    ask, root = Asked(copy), "/api/datasets/d1/recorded"
    assert ask(root, instance_id="t")["r0"]["updates"] == [2]
    write_records(copy, 5, dataset, RESPONSES[1], 0.5)
    first = token_record_path(copy, 5)
    pq.write_table(pq.read_table(first).slice(0, 1), first)  # t_0 only
    token_record_path(copy, 6).write_bytes(b"PAR1")
    assert ask(root, instance_id="t") == {"r0": {"updates": [2, 5], "unreadable": [6]}}
    for name, updates in (("t_0", [2, 5]), ("t_1", [2])):
        assert ask(root, trajectory_id=name, step_index=0)["r0"]["updates"] == updates
    write_records(copy, 2, str(copy / "rollouts" / "iteration_00000"), RESPONSES[0], 0.5)
    assert ask(root, instance_id="t")["r0"]["updates"] == [5]


def test_a_moved_run_still_knows_its_iterations(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "copies" / "moved")
    monkeypatch.chdir(tmp_path / "copies")
    ask = Asked("moved")
    for iteration, update in ((0, 1), (1, 2)):
        rows = ask(f"/api/runs/r0/updates/{update}")
        assert rows["dataset"].unique().to_list() == [f"d{iteration}"]


def test_records_of_a_row_that_has_changed_are_not_shown(run, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(run, changed)
    dataset = changed / "rollouts" / "iteration_00001"
    shutil.rmtree(dataset)
    write_dataset(dataset, RESPONSES[0])
    of = {"trajectory_id": "t_0", "step_index": 0, "run": "r0", "update": 2}
    tokens = Asked(changed)("/api/datasets/d1/tokens", **of)
    assert tokens.select(pl.col("advantage", "loss").null_count()).row(0) == (len(tokens),) * 2


def test_an_evaluation_does_not_hide_the_metrics_of_its_update(ask):
    found = ask("/api/runs/r0/metrics")
    assert found["global_step"] == [0, 1, 2]
    assert found["metrics"] == {
        "iteration": [0, 0, 1],
        "loss": [None, 0.7, 0.6],
        "evaluation/return_mean": [0.1, 0.2, None],
        "eval/all/avg_score": [None, 0.3, None],
        "skipped": [None, 0, 0],
    }
    assert found["about"].keys() == found["metrics"].keys() - {"eval/all/avg_score"}
    assert found["about"]["iteration"]["unit"] == "iterations"
    assert found["about"]["loss"]["meaning"].startswith("Minimised loss")
    assert ask("/api/sources")["runs"][0]["updates"] == [1, 2]


CHANGES = {
    "another order of the prompt": {"prompt_token_ids": [2, 1]},
    "another order of the response": {"response_ids": [8, 7, 6, 5]},
    "another reward": {"reward": 0.5},
    "another mask": {"loss_mask": [True, True, True, False]},
    "log-probabilities": {"rollout_logprobs": [-1.0] * 4},
}


def changes_named(run):
    return [text for text in Asked(run)("/api/sources")["warnings"] if "changed since" in text]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_dataset_that_changed_since_the_run_is_named_whatever_changed(run, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    dataset = copy / "rollouts" / "iteration_00000"
    write_records(copy, 1, str(dataset), RESPONSES[0], 0.5)
    assert changes_named(copy) == []
    rows = read(dataset).to_pylist()
    rows[1] |= change
    shutil.rmtree(dataset)
    with RolloutWriter(dataset) as writer:
        writer.write(pa.Table.from_pylist(rows, arrow_schema(tuple(rows[1]))))
    (warning,) = changes_named(copy)
    assert "1 of 2 recorded rows differ, the first in trajectory t_1" in warning


@pytest.mark.parametrize("path", ["/api/datasets/d0/trajectories", "/api/datasets/d0/tokens"])
def test_a_dataset_that_is_replaced_under_the_viewer_is_refused(tmp_path, path):
    write_dataset(tmp_path / "ds", [5, 6])
    ask, asked = Asked(tmp_path / "ds"), {"trajectory_id": "t_0"} if "tokens" in path else {}
    ask(path, **asked)
    with RolloutWriter(tmp_path / "other") as writer:
        writer.write(read(tmp_path / "ds"))
    (shard,), (other,) = ((tmp_path / name).glob("*.parquet") for name in ("ds", "other"))
    other.replace(shard)
    with pytest.raises(RolloutError, match=r"part-00000\.parquet: the file was replaced") as error:
        ask(path, **asked)
    assert error.value.rule == "input_file"
