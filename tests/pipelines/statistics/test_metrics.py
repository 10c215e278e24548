import itertools
import json
import math
import tempfile
from itertools import groupby
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollout_io
from pipelines.merging.merge import merge
from pipelines.statistics.metrics import METRIC_SCHEMA, dataset_metrics, pass_at_k, trajectories
from rollout_io import RolloutWriter, from_generator_output
from rollout_io.cli.main import run
from schemas.strategies import rollout_tables
from tests.conftest import ROOT
from tests.helpers.examples import examples
from tests.helpers.table_helpers import STEPS

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(40)
)
LISTS = pa.list_(pa.int32())


def found(frame, outcome="last"):
    table = dataset_metrics(frame, outcome).collect()
    return {(per, name): (value, num, left) for per, name, value, num, left in table.rows()}


def value(frame, per, name, outcome="last"):
    return found(frame, outcome)[per, name][0]


def attempts(returns, errors=None, instances=None):
    """One trajectory of one step for each return, all of one instance unless told."""
    num = len(returns)
    instances = instances or ["a"] * num
    return pl.DataFrame(
        {
            "instance_id": instances,
            "trajectory_id": [f"{name}_{i}" for i, name in enumerate(instances)],
            "step_index": [0] * num,
            "response_ids": [[5] * (i + 1) for i in range(num)],
            "loss_mask": [[True] * (i + 1) for i in range(num)],
            "reward": returns,
            "error": errors or [None] * num,
        },
        schema_overrides={"reward": pl.Float64, "error": pl.String, "step_index": pl.Int32},
    )


def with_column(name, values, kind=None):
    responses = pa.array([[3], [4, 5, 6]], LISTS)
    masks = [[True], [False, True, True]]
    table = pa.table(STEPS | {"response_ids": responses, "loss_mask": masks})
    return table.append_column(name, pa.array(values, kind))


def test_lengths_are_per_step_and_per_trajectory_apart():
    table = with_column("reward", [0.5, 1.0])
    rows = found(table)
    assert rows["step", "generate/avg_num_tokens"] == (2.0, 2, 0)
    assert rows["step", "generate/avg_response_length"] == (2.0, 2, 0)
    assert rows["step", "generate/min_num_tokens"] == (1.0, 2, 0)
    assert rows["step", "generate/std_num_tokens"] == (1.0, 2, 0)
    assert rows["step", "generate/avg_assistant_tokens"] == (1.5, 2, 0)
    assert rows["step", "generate/tokens_per_turn_max"] == (2.0, 2, 0)
    assert rows["trajectory", "generate/avg_num_tokens"] == (4.0, 1, 0)
    assert rows["trajectory", "generate/std_num_tokens"] == (0.0, 1, 0)
    assert rows["trajectory", "generate/max_assistant_tokens"] == (3.0, 1, 0)
    assert rows["trajectory", "generate/avg_num_turns"] == (2.0, 1, 0)
    assert rows["trajectory", "avg_score"] == (1.0, 1, 0)
    assert value(table, "trajectory", "avg_score", "sum") == 1.5


def test_a_trajectory_has_the_lengths_of_its_steps():
    row = trajectories(with_column("reward", [0.0, 1.0])).collect().row(0, named=True)
    assert row["step_tokens"] == [1, 3]
    assert row["step_assistant_tokens"] == [1, 2]
    assert row["return"] == 1.0


def test_the_turns_of_a_row_are_its_sampled_ranges():
    spans = [{"start": 0, "length": 1, "step_index": 1}, {"start": 2, "length": 1, "step_index": 1}]
    rows = found(with_column("segments", [None, spans]))
    assert rows["step", "generate/tokens_per_turn_mean"] == (1.0, 3, 0)
    assert rows["step", "generate/avg_num_tokens"] == (2.0, 2, 0)


@given(st.lists(st.lists(st.booleans(), min_size=1), min_size=1))
def test_turns_of_rows_with_observations_are_runs_of_the_loss_mask(masks):
    output = {
        "prompt_token_ids": [[1]] * len(masks),
        "response_ids": [[2] * len(mask) for mask in masks],
        "loss_masks": masks,
        "rewards": [1.0] * len(masks),
    }
    lengths = [len(list(run)) for mask in masks for on, run in groupby(mask) if on]
    rows = found(from_generator_output(output, group_size=1))
    mean = sum(lengths) / len(lengths) if lengths else None
    assert rows["step", "generate/tokens_per_turn_mean"] == (
        pytest.approx(mean) if lengths else None,
        len(lengths),
        0,
    )


@pytest.mark.slow
@relaxed
@given(
    rollout_tables(), st.sampled_from(["consecutive", "lineage"]), st.sampled_from(["last", "sum"])
)
def test_merging_changes_no_metric(table, rule, outcome):
    steps, merged = found(table, outcome), found(merge(table, rule), outcome)
    assert steps.keys() == merged.keys()
    for name, (before, *counts) in steps.items():
        after, *counts_after = merged[name]
        assert counts == counts_after, name
        assert before == pytest.approx(after), name


@pytest.mark.slow
@relaxed
@given(rollout_tables())
def test_failed_trajectories_enter_nothing_but_the_counts_of_failures(table):
    frame = pl.DataFrame(pl.from_arrow(table))
    has_error = "error" in frame.columns
    failed = frame.filter(pl.col("error").is_not_null()) if has_error else frame.clear()
    healthy = frame.filter(~pl.col("trajectory_id").is_in(failed["trajectory_id"].to_list()))
    every, alone = found(frame), found(healthy)
    per_step = [name for name in every if name[0] == "step"]
    per_trajectory = [
        name
        for name in every
        if name[0] == "trajectory" and name[1] != "generate/num_error_trajectories"
    ]
    for name in per_step + per_trajectory:
        assert every[name][:2] == pytest.approx(alone[name][:2]), name
    num_failed = failed["trajectory_id"].n_unique()
    assert every["trajectory", "generate/num_error_trajectories"][0] == num_failed
    assert every["trajectory", "generate/avg_num_tokens"][2] == num_failed
    masked = every["group", "generate/num_masked_instances"][0]
    assert masked == failed["instance_id"].n_unique()


def test_unknown_returns_are_counted_and_enter_no_score():
    rows = found(attempts([1.0, None, 0.0, None], [None, None, None, "timeout"]))
    assert rows["trajectory", "num_unknown_reward"] == (1.0, 3, 1)
    assert rows["trajectory", "avg_score"] == (0.5, 2, 2)
    assert rows["trajectory", "generate/avg_num_tokens"] == (2.0, 3, 1)
    assert rows["group", "pass@2"] == (1.0, 1, 0)


def test_negative_returns_are_neither_zero_nor_positive():
    rows = found(attempts([-1.0, 0.0, 2.0, None]))
    assert rows["trajectory", "generate/avg_tokens_non_zero_rewards"] == (2.0, 2, 1)
    assert rows["trajectory", "generate/avg_tokens_zero_rewards"] == (2.0, 1, 1)
    assert rows["trajectory", "mean_positive_reward"][0] == pytest.approx(2 / 3)
    assert rows["trajectory", "avg_score"][0] == pytest.approx(1 / 3)


def test_a_group_passes_by_its_returns_wherever_the_reward_lies_among_the_tokens():
    first_token = with_column("rewards", [[0.0], [1.0, 0.0, 0.0]])
    table = first_token.append_column("reward", pa.array([0.0, 1.0]))
    assert value(table, "group", "pass_at_n") == 1.0
    earlier_step = with_column("reward", [1.0, 0.0])
    assert value(earlier_step, "group", "pass_at_n") == 0.0
    assert value(earlier_step, "group", "pass_at_n", "sum") == 1.0


def test_pass_at_k_counts_the_draws_that_hold_a_correct_attempt():
    for num in range(1, 7):
        for correct, k in itertools.product(range(num + 1), range(1, num + 1)):
            draws = list(itertools.combinations(range(num), k))
            passed = sum(any(attempt < correct for attempt in draw) for draw in draws)
            assert pass_at_k(num, correct, k) == pytest.approx(passed / len(draws))


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1))
def test_pass_at_k_is_unbiased(num, k, chance):
    k = min(k, num)
    expected = sum(
        math.comb(num, c) * chance**c * (1 - chance) ** (num - c) * pass_at_k(num, c, k)
        for c in range(num + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-9)


def test_pass_at_k_of_thousands_of_attempts_is_exact():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert pass_at_k(10_000, 9_950, 51) == 1.0


def test_groups_of_fewer_than_k_attempts_are_left_out_and_counted():
    instances = ["a", "a", "a", "b", "c"]
    rows = found(attempts([1.0, 0.0, 0.0, 1.0, None], instances=instances))
    assert rows["group", "pass@1"] == (pytest.approx((1 / 3 + 1) / 2), 2, 1)
    assert rows["group", "pass@2"] == (pytest.approx(2 / 3), 1, 2)
    assert rows["group", "pass@3"] == (1.0, 1, 2)
    assert rows["group", "pass_at_n"] == (1.0, 2, 1)
    assert ("group", "pass@4") not in rows


def test_environment_metrics_are_means_over_trajectories_that_have_them():
    kind = pa.map_(pa.string(), pa.float64())
    table = with_column("metrics", [[("score", 1.0)], [("score", 3.0), ("turns", 2.0)]], kind)
    other = pa.table(
        STEPS
        | {"trajectory_id": ["b_0", "b_0"], "metrics": pa.array([None, [("score", 6.0)]], kind)}
    )
    both = pa.concat_tables([table, other])
    rows = found(both)
    assert rows["trajectory", "environment/score"] == (4.0, 2, 0)
    assert rows["trajectory", "environment/turns"] == (2.0, 1, 1)


def test_a_table_without_rows_has_no_values():
    rows = found(attempts([1.0]).clear())
    assert rows["trajectory", "avg_score"] == (None, 0, 0)
    assert rows["step", "generate/max_num_tokens"] == (None, 0, 0)
    assert rows["group", "pass_at_n"] == (None, 0, 0)


@pytest.mark.slow
@relaxed
@given(rollout_tables(min_trajectories=1))
def test_a_dataset_in_many_row_groups_has_the_metrics_of_the_table(table):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        with RolloutWriter(path, row_group_rows=1) as writer:
            writer.write(table)
        lazy = dataset_metrics(rollout_io.scan(path))
        assert lazy.collect_schema() == METRIC_SCHEMA
        streamed = lazy.collect(engine="streaming")
    whole = dataset_metrics(table).collect()
    names = ["per", "metric", "num", "num_left_out"]
    assert streamed.select(names).equals(whole.select(names))
    assert streamed["value"].to_list() == pytest.approx(whole["value"].to_list())


def test_every_metric_of_stats_has_its_line_in_the_documentation(shop_dataset, capsys):
    assert run(["stats", str(shop_dataset), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["metrics"]
    assert list(printed) == ["step", "trajectory", "group"]
    assert printed["group"]["pass@1"] == {"value": 0.25, "num": 12, "num_left_out": 0}
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name in (name for found in printed.values() for name in found):
        general = {"environment/truth": "environment/<key>"}.get(name, name)
        general = "pass@k" if name.startswith("pass@") else general
        assert f"`{general}`" in page, name
