"""What `rollouts view` shows of a run equals what the trainer logged and recorded."""

import json
import math
import shutil
from pathlib import Path

import polars as pl
import pytest

import rollout_io
import trainer
from pipelines import scan_token_records
from rollout_io.cli.main import run as command
from schemas.errors import InputError
from schemas.records import TOKEN_RECORD_COLUMNS, token_record_path
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import metrics_of, save_tiny_model, write_dataset
from tests.helpers.view_helpers import Asked

pytestmark = pytest.mark.slow

ONE = {
    "advantages": "advantage",
    "weights": "weight",
    "old_logprobs": "old_logprob",
    "logprobs": "logprob",
    "ref_logprobs": "ref_logprob",
    "importance_weights": "importance_weight",
    "correction_weights": "correction_weight",
    "entropy": "entropy",
    "losses": "loss",
    "clipped": "clipped",
    "rejected": "rejected",
}


@pytest.fixture(scope="module")
def dataset(shop_dataset, tmp_path_factory):
    """Four groups of the shop example: all styles, and rewards that differ."""
    path = tmp_path_factory.mktemp("four") / "ds"
    chosen = ["--where", "instance_id IN ('shop-4', 'shop-5', 'shop-7', 'shop-8')"]
    assert command(["filter", str(shop_dataset), *chosen, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """Trained two updates by a tiny model."""
    folder = tmp_path_factory.mktemp("run")
    config = train_config(
        dataset=str(dataset),
        model=save_tiny_model(folder / "model", vocab_size=49152, max_position_embeddings=1024),
        out=str(folder / "run"),
        record_tokens="all",
        groups_per_batch=2,
        groups_per_mini_batch=2,
        learning_rate=1e-3,
        kl_loss_coef=0.1,
        save_every_updates=2,
    )
    trainer.train(config)
    return folder / "run"


@pytest.fixture(scope="module")
def ask(run, smollm2_dir):
    return Asked(run, tokenizer=str(smollm2_dir))


@pytest.fixture(scope="module")
def records(run):
    return pl.read_parquet(token_record_path(run, 1))


def test_a_run_brings_its_dataset_and_updates(ask, run, dataset):
    found = ask("/api/sources")
    assert found["runs"] == [
        {
            "id": "r0",
            "name": "run",
            "path": str(run),
            "datasets": ["d0"],
            "updates": [1, 2],
            "token_updates": [1, 2],
            "token_datasets": ["d0", "d0"],
            "samples": False,
        }
    ]
    assert found["datasets"][0]["num_rows"] == rollout_io.read(dataset).num_rows


def test_a_dataset_with_other_tokens_is_shown_without_what_the_run_recorded(
    run, dataset, smollm2_dir, tmp_path
):
    """One token differs; ids and lengths are the same."""
    rows = rollout_io.read(dataset).to_pylist()
    rows[-1]["response_ids"][0] += 1
    copy, moved = tmp_path / "ds", shutil.copytree(run, tmp_path / "run")
    write_dataset(copy, rows)
    for file in (moved / "tokens").iterdir():
        named = pl.read_parquet(file).with_columns(dataset=pl.lit(str(copy)))
        named.write_parquet(file)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"data": {"dataset": str(copy)}}))
    found = Asked(moved, tokenizer=str(smollm2_dir))("/api/sources")
    name, step = rows[-1]["trajectory_id"], rows[-1]["step_index"]
    (warning,) = found["warnings"]
    rows = scan_token_records(run).select("trajectory_id", "step_index").unique()
    num_recorded = len(rows.collect())
    assert f"1 of {num_recorded} recorded rows differ, the first in trajectory {name}" in warning
    assert f"step {step}" in warning
    assert found["runs"][0]["datasets"] == []


def test_a_run_with_a_damaged_record_opens_and_names_the_file(run, smollm2_dir, tmp_path):
    moved = shutil.copytree(run, tmp_path / "run")
    newest = token_record_path(moved, 2)
    newest.write_bytes(newest.read_bytes()[:99])
    ask = Asked(moved, tokenizer=str(smollm2_dir))
    assert ask("/api/sources")["runs"][0]["token_updates"] == [1, 2]
    with pytest.raises(InputError, match=r"global_step_2\.parquet.*\[readable_file\]"):
        ask("/api/runs/r0/updates/2")


def test_a_run_whose_dataset_is_damaged_opens_with_a_warning(run, smollm2_dir, tmp_path):
    moved = shutil.copytree(run, tmp_path / "run")
    dataset = Path(json.loads((moved / "config.json").read_text())["data"]["dataset"])
    damaged = shutil.copytree(dataset, tmp_path / "damaged")
    for record in (moved / "tokens").glob("*.parquet"):
        renamed = pl.read_parquet(record).with_columns(dataset=pl.lit(str(damaged)))
        renamed.write_parquet(record)
    config = (moved / "config.json").read_text().replace(str(dataset), str(damaged))
    (moved / "config.json").write_text(config)
    shard = next(damaged.rglob("*.parquet"))
    data = bytearray(shard.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    shard.write_bytes(data)
    found = Asked(moved, tokenizer=str(smollm2_dir))("/api/sources")
    assert any("unreadable" in text for text in found["warnings"])


def test_metrics_are_those_of_the_log(ask, run):
    lines = metrics_of(run)
    found = ask("/api/runs/r0/metrics")
    assert found["global_step"] == [line["global_step"] for line in lines] == [1, 2]
    assert found["metrics"]["loss"] == [line["loss"] for line in lines]
    for name, values in found["metrics"].items():
        assert values == [
            line.get(name) if isinstance(line.get(name), int | float) else None for line in lines
        ]


def test_rows_of_an_update_add_up_to_its_loss(ask, run, records):
    found = ask("/api/runs/r0/updates/1")
    lines = metrics_of(run)
    assert math.fsum(found["loss_share"]) == pytest.approx(lines[0]["loss"], rel=1e-5, abs=1e-7)
    assert found["num_targets"].sum() == lines[0]["num_trained_tokens"]
    assert found["loss_share"].abs().is_sorted(descending=True)
    assert len(found) == len(records)
    assert found["dataset"].unique().to_list() == ["d0"]


def test_numbers_of_an_update_are_those_of_its_targets(ask, records, dataset):
    found = ask("/api/runs/r0/updates/1")
    stored = rollout_io.scan(dataset).collect()
    keys = ("trajectory_id", "step_index")
    for shown in found.to_dicts():
        key = {name: shown[name] for name in keys}
        record = records.filter(**key).to_dicts()[0]
        row = stored.filter(**key).to_dicts()[0]
        targets = [i for i, is_target in enumerate(record["loss_mask"]) if is_target]
        assert shown["num_targets"] == len(targets)
        weights = [record["importance_weights"][i] for i in targets]
        assert shown["max_importance_weight"] == max(weights)
        apart = [abs(record["logprobs"][i] - row["rollout_logprobs"][i]) for i in targets]
        assert shown["max_abs_difference"] == max(apart)
        assert shown["mean_abs_difference"] == pytest.approx(sum(apart) / len(apart), rel=1e-12)
        assert shown["num_clipped"] == sum(record["clipped"][i] for i in targets)
        shares = [record["weights"][i] * record["losses"][i] for i in targets]
        assert shown["loss_share"] == pytest.approx(math.fsum(shares), rel=1e-9, abs=1e-12)


def test_tokens_of_an_update_are_its_records_bit_for_bit(ask, records):
    for record in records[::7].to_dicts():
        key = {name: record[name] for name in ("trajectory_id", "step_index")}
        found = ask("/api/datasets/d0/tokens", **key, run="r0", update=1)
        num_prompt = len(found) - len(record["loss_mask"])
        for name, one in ONE.items():
            values = record[name] or [None] * len(record["loss_mask"])
            kind = records.schema[name].inner
            expected = pl.Series(one, [None] * num_prompt + values, dtype=kind)
            assert found[one].equals(expected, null_equal=True)
    assert set(ONE) | {"loss_mask"} == {
        c.name for c in TOKEN_RECORD_COLUMNS if c.length.value == "response"
    }


def test_targets_are_drawn_evenly(ask, records):
    rows = ask("/api/runs/r0/updates/1")
    table = ask.table("/api/runs/r0/updates/1/targets", limit=50)
    num = int(rows["num_targets"].sum())
    assert table.schema.metadata == {b"total": str(num).encode()}
    assert table.num_rows == 50
    for target in table.to_pylist():
        shown = rows.row(target["row"], named=True)
        key = {name: shown[name] for name in ("trajectory_id", "step_index")}
        record = records.filter(**key).to_dicts()[0]
        assert record["loss_mask"][target["position"]]
        assert target["logprob"] == record["logprobs"][target["position"]]
        assert target["importance_weight"] == record["importance_weights"][target["position"]]
        assert target["clipped"] == record["clipped"][target["position"]]
    assert len(ask("/api/runs/r0/updates/1/targets", limit=100_000)) == num


def test_groups_and_trees_show_advantages(ask, records):
    record = records.row(0, named=True)
    of = {"instance_id": record["instance_id"], "run": "r0", "update": 1}
    attempts = ask("/api/datasets/d0/group", **of)["attempts"]
    for attempt in attempts:
        own = records.filter(trajectory_id=attempt["trajectory_id"])
        values = own["advantages"].explode(empty_as_null=True, keep_nulls=True).cast(pl.Float64)
        assert attempt["advantage"] == pytest.approx(values.mean(), rel=1e-12)
    nodes = ask("/api/datasets/d0/tree", **of)["nodes"]
    assert any(node["advantage"] is not None for node in nodes)
    assert all(node["advantage"] is None or node["sampled"] for node in nodes)


def test_a_run_without_its_dataset_still_shows_its_metrics(run, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + '{"global_st')
    (moved / "config.json").write_text('{"data": {"dataset": "/nowhere/ds"}}')
    (moved / "tokens").symlink_to(run / "tokens")
    ask = Asked(moved)
    found = ask("/api/sources")
    assert found["datasets"] == []
    assert "/nowhere/ds" in found["warnings"][0]
    assert ask("/api/runs/r0/metrics")["global_step"] == [1, 2]
    rows = ask("/api/runs/r0/updates/2")
    assert rows["dataset"].unique().to_list() == [None]
    assert rows["max_abs_difference"].null_count() == len(rows)
