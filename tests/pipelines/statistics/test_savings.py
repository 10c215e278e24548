import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollout_io
from pipelines.merging.merge import merge_table
from pipelines.statistics.flops import ModelShape, read_model_shape
from pipelines.statistics.savings import LAYOUTS, Cost, Group, OpenTries, _count, dataset_savings
from rollout_io import RolloutWriter
from rollout_io.cli.main import run
from schemas import DatasetMetadata
from schemas.strategies import OPTIONAL_COLUMNS, rollout_tables
from tests.conftest import ROOT
from tests.helpers.examples import examples
from tests.helpers.refusals import refused
from tests.helpers.table_helpers import STEPS, seen_tokens, write_example

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(40)
)
WITHOUT_ROUTING = tuple(n for n in OPTIONAL_COLUMNS if n != "rollout_expert_indices")
DATA = ROOT / "tests" / "data" / "vllm"


def write(path, *tables, layout="prefix"):
    with RolloutWriter(path, layout=layout) as writer:
        for table in tables:
            writer.write(table)
    return path


def tokens_of(path, **arguments):
    return {name: cost.num_tokens for name, cost in dataset_savings(path, **arguments).items()}


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """The calls that asked for two choices as if they had asked for one."""
    rows = rollout_io.scan(DATA / "forks.parquet").collect()
    rows = rows.filter(pl.struct("trajectory_id", "source").is_first_distinct())
    index = pl.int_range(pl.len(), dtype=pl.Int32).over("trajectory_id")
    return write(tmp_path_factory.mktemp("forks") / "ds", rows.with_columns(step_index=index))


def test_every_token_attends_to_those_before_it_and_itself(tmp_path):
    costs = dataset_savings(write_example(tmp_path))
    assert costs["step"] == Cost(2, 8, (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5))
    assert costs["tree_per_group"] == Cost(1, 5, 1 + 2 + 3 + 4 + 5)


def test_the_real_calls_cost_the_known_numbers(shop_dataset, forks):
    known = {
        shop_dataset: ([43_897, 20_760, 19_536, 16_075, 13_896], [205, 89, 82, 48, 12]),
        forks: ([27_788, 18_046, 13_356, 10_511, 9_088], [165, 105, 65, 32, 8]),
        DATA / "long.parquet": ([60_106, 22_978, 22_978, 9_977, 9_330], [187, 80, 80, 16, 4]),
    }
    for path, (num_tokens, num_sequences) in known.items():
        costs = dataset_savings(path)
        assert list(costs) == list(LAYOUTS)
        assert [cost.num_tokens for cost in costs.values()] == num_tokens
        assert [cost.num_sequences for cost in costs.values()] == num_sequences


def test_a_second_choice_of_a_prompt_costs_only_its_own_tokens(forks):
    more = dataset_savings(DATA / "forks.parquet")
    less = dataset_savings(forks)
    rows = rollout_io.scan(DATA / "forks.parquet").collect()
    second = rows.filter(~pl.struct("trajectory_id", "source").is_first_distinct())
    assert len(second) == 8
    extra = {n: more[n].num_tokens - less[n].num_tokens for n in LAYOUTS}
    response = second["response_ids"].list.len().sum()
    assert extra["step"] == second["prompt_token_ids"].list.len().sum() + response
    assert 0 < extra["tree_per_trajectory"] <= response


def prefixes(rows, *key):
    return {
        (*(row[k] for k in key), tuple(tokens[:depth]))
        for row in rows
        for tokens in [seen_tokens(row)]
        for depth in range(1, len(tokens) + 1)
    }


def cost_of_tree(rows, *key):
    nodes = prefixes(rows, *key)
    lengths = [len(node[-1]) for node in nodes]
    return Cost(lengths.count(1), len(nodes), sum(lengths))


def cost_of_rows(rows):
    lengths = [len(row["prompt_token_ids"] + row["response_ids"]) for row in rows]
    attended = sum(n * (n + 1) // 2 for n in lengths)
    return Cost(sum(n > 0 for n in lengths), sum(lengths), attended)


def healthy(table):
    frame = pl.DataFrame(pl.from_arrow(table))
    if "error" in frame.columns:
        frame = frame.filter(pl.col("error").is_null().all().over("trajectory_id"))
    return frame


@pytest.mark.slow
@relaxed
@given(rollout_tables(optional=WITHOUT_ROUTING), st.sampled_from(["prefix", "full"]))
def test_savings_are_those_of_the_tries_and_merges_spelled_out(table, layout):
    kept = healthy(table)
    names = ("instance_id", "trajectory_id", "prompt_token_ids", "response_ids", "pictures")
    rows = kept.select(name for name in names if name in kept.columns).to_dicts()
    expected = {"step": cost_of_rows(rows)}
    for rule in ("consecutive", "lineage"):
        merged = merge_table(kept.to_arrow(), rule).select(["prompt_token_ids", "response_ids"])
        expected[f"merge_{rule}"] = cost_of_rows(merged.to_pylist())
    expected["tree_per_trajectory"] = cost_of_tree(rows, "trajectory_id")
    expected["tree_per_group"] = cost_of_tree(rows, "instance_id")
    with tempfile.TemporaryDirectory() as folder:
        assert dataset_savings(write(Path(folder) / "ds", table, layout=layout)) == expected


@pytest.mark.slow
@relaxed
@given(rollout_tables(optional=WITHOUT_ROUTING), st.sampled_from(["consecutive", "lineage"]))
def test_merging_a_dataset_changes_none_of_its_savings(table, rule):
    with tempfile.TemporaryDirectory() as folder:
        steps = dataset_savings(write(Path(folder) / "steps", table))
        assert dataset_savings(write(Path(folder) / "merged", merge_table(table, rule))) == steps


@pytest.mark.slow
@relaxed
@given(rollout_tables(max_trajectories=8), st.integers(0, 60))
def test_memory_for_few_tokens_takes_more_passes_and_counts_the_same(table, max_open_tokens):
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "ds", table)
        assert dataset_savings(path, max_open_tokens=max_open_tokens) == dataset_savings(path)


def test_groups_are_counted_with_their_tokens_and_trajectories(tmp_path):
    rows = one_row("a", 0, [1, 2, 3]), one_row("a", 1, [1, 2, 4, 5]), one_row("b", 0, [1, 2, 3])
    _, groups = _count(write(tmp_path / "ds", *rows))
    assert groups == {"a": Group(7, 2), "b": Group(3, 1)}


def test_the_tries_in_memory_hold_no_more_than_they_may():
    groups = {"a": Group(6, 2), "b": Group(4, 1), "c": Group(5, 1), "big": Group(99, 1)}
    tries = OpenTries(groups, max_tokens=10)
    held = []
    for instance in ["a", "b", "c", "big", "a", "big"]:
        is_open = tries.next(instance) is not None
        held.append((instance, is_open, tries.num_tokens))
    assert held == [
        *(("a", True, 6), ("b", True, 6), ("c", False, 6)),
        *(("big", False, 6), ("a", True, 0), ("big", False, 0)),
    ]
    assert list(tries.later) == ["c", "big"]


def test_a_group_scattered_over_shards_is_one_tree(tmp_path):
    tables = [one_row("a", 0, [1, 2, 3]), one_row("b", 0, [1, 2, 3]), one_row("a", 1, [1, 2, 4])]
    for index, table in enumerate(tables):
        write(tmp_path / f"{index}", table)
        (file,) = (tmp_path / f"{index}").glob("*.parquet")
        file.rename(tmp_path / f"part-{index:05d}.parquet")
    for limit in (1, 100):
        assert dataset_savings(tmp_path, limit)["tree_per_group"] == Cost(2, 7, 6 + 6 + 3)


def one_row(instance, repetition, tokens, error=None):
    return pa.table(
        {
            "instance_id": [instance],
            "repetition_id": pa.array([repetition], pa.int32()),
            "trajectory_id": [f"{instance}_{repetition}"],
            "step_index": pa.array([0], pa.int32()),
            "is_last_step": [True],
            "prompt_token_ids": pa.array([tokens[:-1]], pa.list_(pa.int32())),
            "response_ids": pa.array([tokens[-1:]], pa.list_(pa.int32())),
            "loss_mask": [[True]],
            "token_source": ["engine"],
            "error": pa.array([error], pa.string()),
        }
    )


def test_failed_trajectories_are_left_out(tmp_path):
    path = write(tmp_path, one_row("a", 0, [1, 2, 3]), one_row("a", 1, [1, 2, 4], "timeout"))
    assert set(tokens_of(path).values()) == {3}


def test_a_dataset_without_rows_costs_nothing(tmp_path):
    empty = pa.table(STEPS).slice(0, 0)
    assert set(map(str, dataset_savings(write(tmp_path, empty)).values())) == {str(Cost())}


@pytest.mark.slow
def test_a_trajectory_is_counted_without_its_prompts_being_made(tmp_path):
    """Together they would hold 5e10 tokens."""
    num_steps, added = 100_000, 5
    index = np.arange(num_steps)
    prefix = np.maximum(2 * added * index, 0)
    ones = np.ones(num_steps, np.bool_)
    tokens = np.random.default_rng(0).integers(0, 99, num_steps * added).astype(np.int32)
    lists = pa.array(np.arange(num_steps + 1) * added, pa.int32())
    table = pa.table(
        {
            "instance_id": pa.array(["a"]).take(pa.array(np.zeros(num_steps, np.int64))),
            "repetition_id": pa.array(np.zeros(num_steps), pa.int32()),
            "trajectory_id": pa.array(["a_0"]).take(pa.array(np.zeros(num_steps, np.int64))),
            "step_index": pa.array(index, pa.int32()),
            "is_last_step": index == num_steps - 1,
            "parent_step_index": pa.array(index - 1, pa.int32(), mask=index == 0),
            "prefix_length": pa.array(prefix, pa.int32()),
            "prompt_suffix_ids": pa.ListArray.from_arrays(lists, pa.array(tokens)),
            "response_ids": pa.ListArray.from_arrays(lists, pa.array(tokens)),
            "loss_mask": pa.ListArray.from_arrays(lists, pa.array(np.repeat(ones, added))),
            "token_source": pa.array(["engine"]).take(pa.array(np.zeros(num_steps, np.int64))),
        }
    ).replace_schema_metadata(DatasetMetadata().encode("prefix"))
    pq.write_table(table, tmp_path / "part-00000.parquet")
    found = tokens_of(tmp_path)
    distinct = 2 * added * num_steps
    assert found.pop("step") == added * num_steps * (num_steps + 1)
    assert set(found.values()) == {distinct}


def test_flops_are_six_per_parameter_and_token_and_twelve_per_width_and_key():
    shape = ModelShape(num_params=100, num_layers=1, attention_width=2)
    cost = Cost(num_sequences=1, num_tokens=3, num_attended=6)
    assert shape.training_flops(cost) == 6 * 100 * 3 + 12 * 1 * 2 * 6 == 1944.0


SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def write_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_parameters_are_counted_from_the_config(tmp_path):
    shape = read_model_shape(write_config(tmp_path, SMOLLM2))
    norms = (2 * 30 + 1) * 576
    assert shape == ModelShape(
        num_params=134_515_008 - norms, num_layers=30, attention_width=9 * 64
    )
    inside = read_model_shape(write_config(tmp_path, {"text_config": SMOLLM2}))
    assert inside == shape
    given_params = read_model_shape(write_config(tmp_path, SMOLLM2), 2e9)
    assert given_params == dataclasses.replace(shape, num_params=2e9)


def test_of_experts_those_count_that_a_token_is_sent_to(tmp_path):
    experts = {"num_experts_per_tok": 8, "moe_intermediate_size": 192, "num_experts": 64}
    dense = read_model_shape(write_config(tmp_path, SMOLLM2))
    assert read_model_shape(write_config(tmp_path, SMOLLM2 | experts)) == dense


@pytest.mark.model
def test_the_count_is_that_of_the_real_weights_without_norms(smollm2_dir):
    with (smollm2_dir / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
    matrices = sum(rows[0] * rows[1] for rows in shapes if len(rows) == 2)
    assert read_model_shape(str(smollm2_dir)).num_params == matrices


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, "input_file"),
        ("{", "input_file"),
        ("[]", "input_file"),
        ("{}", "model_config"),
        (json.dumps(SMOLLM2 | {"num_attention_heads": 0}), "model_config"),
        (json.dumps(SMOLLM2 | {"hidden_size": "wide"}), "model_config"),
        (json.dumps(SMOLLM2 | {"kv_lora_rank": 512}), "model_config"),
    ],
)
def test_a_config_that_does_not_tell_the_shape_is_refused(tmp_path, text, rule):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with refused(rule, hint="--params"):
        read_model_shape(str(tmp_path))


def test_stats_print_the_savings(shop_dataset, tmp_path, capsys):
    model = write_config(tmp_path, SMOLLM2)
    assert run(["stats", str(shop_dataset), "--model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["savings"]
    assert found["tree_per_group"]["num_tokens"] == 13_896
    assert found["tree_per_group"]["relative_tokens"] == 13_896 / 43_897
    shape = read_model_shape(model)
    for layout, cost in dataset_savings(shop_dataset).items():
        assert found[layout]["training_flops"] == shape.training_flops(cost)
    assert run(["stats", str(shop_dataset), "--all"]) == 0
    printed = capsys.readouterr().out
    assert ["merge_consecutive", "89", "20,760", "47.3%"] in [
        r.split() for r in printed.split("\n")
    ]
    assert "FLOPs" not in printed
