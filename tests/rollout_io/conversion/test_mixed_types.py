"""A column whose type differs between inputs: the message names the input."""

import json

import polars as pl
import pytest

import rollout_io
from rollout_io.cli.main import run
from rollout_io.dataset.reader import refuse_mixed_types
from rollout_io.dataset.storage import find_shards
from schemas.errors import RolloutError


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GeneratorOutput fields without a matching column")
def test_documents_of_different_types_are_refused_by_name(shop_dataset, tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert run(["export", str(shop_dataset), "--format", "skyrl", "--out", str(first)]) == 0
    output = json.loads(first.read_text())
    num_rows = len(output["response_ids"])
    first.write_text(json.dumps(output | {"score": [1] * num_rows}))
    for trajectory in output["trajectory_ids"]:
        trajectory["instance_id"] += "-again"
    second.write_text(json.dumps(output | {"score": ["one"] * num_rows}))
    capsys.readouterr()
    out = tmp_path / "out"
    arguments = [str(first), str(second), "--other-fields", "keep", "--out", str(out)]
    assert run(["convert", *arguments]) == 1
    printed = capsys.readouterr().err
    assert f"Error: {second}" in printed
    assert "Field score has incompatible types: int64 vs string" in printed
    assert "[columns_and_types]" in printed
    assert ".converting" not in printed
    assert not out.exists()


def test_shards_of_different_types_are_refused_with_the_inputs(shop_dataset, tmp_path):
    rows = rollout_io.scan(shop_dataset).collect()
    for name, value in (("a", pl.lit(1)), ("b", pl.lit("one"))):
        with rollout_io.RolloutWriter(tmp_path / name) as writer:
            writer.write(rows.with_columns(score=value))
    shards = find_shards(tmp_path / "a") + find_shards(tmp_path / "b")
    refuse_mixed_types(shards[:1], "logs.jsonl")
    with pytest.raises(RolloutError, match=r"^logs\.jsonl: the shards have .*Field score"):
        refuse_mixed_types(shards, "logs.jsonl")
