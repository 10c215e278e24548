import json
import tempfile
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from hypothesis import given, settings

import rollout_io
from rollout_io.cli.main import run
from rollout_io.formats import exporting as files
from rollout_io.formats import hugging_face
from schemas.columns import COLUMN_BY_NAME, METRICS_TYPE, routing_type
from schemas.rules import RULES
from schemas.strategies import OPTIONAL_COLUMNS, rollout_tables
from tests.helpers.table_helpers import STEPS


def load(folder, cache):
    return datasets.load_dataset(str(folder), split="train", cache_dir=str(cache))


def logical_rows(dataset):
    return files.without_maps(rollout_io.read(dataset)).to_pylist()


def test_load_dataset_gives_the_real_rollouts_back(shop_dataset, tmp_path):
    out = tmp_path / "shop"
    assert run(["export", str(shop_dataset), "--format", "hf", "--out", str(out)]) == 0
    loaded = load(out, tmp_path / "cache")
    assert loaded.num_rows == 205
    assert loaded.to_list() == logical_rows(shop_dataset)


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(rollout_tables(min_trajectories=1, optional=OPTIONAL_COLUMNS, pictures=False))
def test_load_dataset_gives_every_column_of_any_table_back(table):
    with tempfile.TemporaryDirectory() as folder:
        dataset, out = Path(folder) / "ds", Path(folder) / "out"
        with rollout_io.RolloutWriter(dataset) as writer:
            writer.write(table)
        assert run(["export", str(dataset), "--format", "hf", "--out", str(out)]) == 0
        loaded = load(out, Path(folder) / "cache")
        assert loaded.column_names == rollout_io.read(dataset).column_names
        assert loaded.to_list() == logical_rows(dataset)


def test_the_data_folder_is_a_valid_rollout_dataset(shop_dataset, tmp_path):
    out = tmp_path / "shop"
    hugging_face.write_folder(shop_dataset, out)
    assert run(["validate", str(out / "data")]) == 0
    again = rollout_io.read(out / "data")
    assert again.to_pylist() == rollout_io.read(shop_dataset).to_pylist()
    assert rollout_io.read_metadata(out / "data") == rollout_io.read_metadata(shop_dataset)


def user_table():
    """The user's own columns, with names and types that YAML and `datasets` may stumble over."""
    segments = [
        [{"start": 0, "length": 1, "step_index": 0, "metrics": [{"key": "turns", "value": 2.0}]}],
        None,
    ]
    fields = [(n, pa.int32()) for n in ("start", "length", "step_index")]
    kind = pa.list_(pa.struct([*fields, ("metrics", METRICS_TYPE)]))
    return pa.table(
        STEPS
        | {
            "segments": pa.array(segments, kind),
            "rollout_expert_indices": pa.array([[[[1, 2, 3]] * 2], None], routing_type(2, 3)),
            "null": [1, 2],
            "Task: #1": ["x", None],
            "when": pa.array([0, 1], pa.timestamp("us", "UTC")),
            "nested": pa.array([[["a"]], []], pa.list_(pa.list_(pa.string()))),
            "big": pa.array([b"x", b""], pa.binary()),
        }
    )


def test_odd_columns_and_maps_inside_segments_survive(tmp_path):
    with rollout_io.RolloutWriter(tmp_path / "ds") as writer:
        writer.write(user_table())
    hugging_face.write_folder(tmp_path / "ds", tmp_path / "out")
    assert load(tmp_path / "out", tmp_path / "cache").to_list() == logical_rows(tmp_path / "ds")


def test_the_card_declares_the_features_that_datasets_finds_in_the_files(shop_dataset, tmp_path):
    with rollout_io.RolloutWriter(tmp_path / "ds") as writer:
        writer.write(user_table())
    for name, dataset in (("shop", shop_dataset), ("user", tmp_path / "ds")):
        out = tmp_path / name
        hugging_face.write_folder(dataset, out)
        declared = datasets.load_dataset_builder(str(out), cache_dir=str(tmp_path / "c")).info
        found = datasets.Dataset.from_parquet(
            str(out / "data" / "train-00000.parquet"), cache_dir=str(tmp_path / "c")
        )
        assert declared.features == found.features
        assert declared.splits["train"].num_examples == found.num_rows


def test_the_card_says_what_a_row_is_and_how_it_was_made(shop_dataset, tmp_path):
    hugging_face.write_folder(shop_dataset, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "205 rows, 48 trajectories (0 failed" in card
    assert "- 12 groups, trajectories per group: 4\n" in card
    assert "outcome rewards: mean 0.25, from 0 to 1" in card
    assert all(f"`{name}`" in card for name in RULES)
    for name in rollout_io.read(shop_dataset).column_names:
        assert f"| {name} | " in card
        if name in COLUMN_BY_NAME:
            assert COLUMN_BY_NAME[name].meaning in card
    history = [json.loads(line[3:-1]) for line in card.splitlines() if line.startswith("- `{")]
    assert [step["verb"] for step in history] == ["convert"]


@pytest.mark.slow
def test_large_datasets_become_several_shards(shop_dataset, tmp_path, monkeypatch):
    with rollout_io.RolloutWriter(tmp_path / "ds", row_group_rows=20) as writer:
        writer.write(rollout_io.read(shop_dataset))
    monkeypatch.setattr("rollout_io.dataset.writer.SHARD_BYTES", 60_000)
    hugging_face.write_folder(tmp_path / "ds", tmp_path / "out")
    assert len(list((tmp_path / "out" / "data").iterdir())) > 3
    assert load(tmp_path / "out", tmp_path / "cache").to_list() == logical_rows(shop_dataset)


def test_an_empty_dataset_makes_no_folder(tmp_path, capsys):
    with rollout_io.RolloutWriter(tmp_path / "ds") as writer:
        writer.write(pa.table(STEPS).slice(0, 0))
    out = tmp_path / "out"
    assert run(["export", str(tmp_path / "ds"), "--format", "hf", "--out", str(out)]) == 1
    assert "[some_rows]" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["ds"]
