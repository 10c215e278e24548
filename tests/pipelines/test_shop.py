import gzip
import json

import polars as pl
import pytest

import pipelines
import rollout_io
from rollout_io.cli.main import run
from rollout_io.dataset.prefix_layout import encode_prefixes
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def merged_dataset(shop_dataset, tmp_path_factory):
    """By the rule of the reference."""
    path = tmp_path_factory.mktemp("merged") / "ds"
    assert run(["merge", str(shop_dataset), "--out", str(path), "--rule", "consecutive"]) == 0
    return path


def test_the_real_calls_convert_to_the_known_numbers(shop_dataset, capfd):
    assert run(["stats", str(shop_dataset), "--json"]) == 0
    stats = json.loads(capfd.readouterr().out)
    wanted = {
        "num_rows": 205,
        "num_trajectories": 48,
        "num_groups": 12,
        "num_groups_with_variance": 7,
        "reward_mean": 0.25,
        "num_tokens": 43_897,
    }
    assert {name: stats[name] for name in wanted} == wanted
    assert run(["validate", str(shop_dataset)]) == 0


@pytest.mark.parametrize(
    ("rule", "num_rows", "num_tokens"), [("consecutive", 89, 20_760), ("lineage", 82, 19_536)]
)
def test_merging_the_real_calls_gives_the_known_numbers_and_unmerging_the_steps(
    rule, num_rows, num_tokens, shop_dataset, tmp_path, capfd
):
    merged, steps = tmp_path / "merged", tmp_path / "steps"
    assert run(["merge", str(shop_dataset), "--out", str(merged), "--rule", rule, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "num_rows_before": 205,
        "num_tokens_before": 43_897,
        "num_rows_after": num_rows,
        "num_tokens_after": num_tokens,
    }
    assert run(["validate", str(merged)]) == 0
    assert run(["merge", "--undo", str(merged), "--out", str(steps)]) == 0
    back, given = rollout_io.read(steps), rollout_io.read(shop_dataset)
    assert back.select(given.column_names).to_pylist() == given.to_pylist()


def test_the_merged_export_equals_the_references_merge_of_our_unmerged_export(
    merged_dataset, tmp_path
):
    """Ids, masks, log-probabilities, rewards, stop reasons and order; see data/README.md."""
    file = tmp_path / "merged.json"
    assert run(["export", str(merged_dataset), "--format", "skyrl", "--out", str(file)]) == 0
    ours = json.loads(file.read_text())
    reference = json.loads(
        gzip.decompress((ROOT / "tests/data/reference_merge.json.gz").read_bytes())
    )
    assert len(reference["response_ids"]) == 89
    for name, values in reference.items():
        assert ours[name] == values, name


def test_unmerging_the_merged_dataset_gives_the_converted_one_back(shop_dataset, merged_dataset):
    steps = rollout_io.scan(shop_dataset).collect()
    back = pipelines.unmerge(rollout_io.scan(merged_dataset)).collect()
    assert back.select(steps.columns).equals(steps)


def test_most_steps_continue_an_earlier_one_token_for_token(shop_dataset):
    encoded = pl.from_arrow(encode_prefixes(rollout_io.read(shop_dataset)))
    follows = encoded.filter(pl.col("step_index") > 0)
    total = pl.col("prefix_length") + pl.col("prompt_suffix_ids").list.len()
    length = encoded.select(
        "trajectory_id",
        parent_step_index="step_index",
        parent_length=total + pl.col("response_ids").list.len(),
    )
    joined = follows.join(length, on=["trajectory_id", "parent_step_index"], how="left")
    continued = joined.filter(pl.col("prefix_length") == pl.col("parent_length"))
    assert (len(follows), len(continued)) == (157, 123)
