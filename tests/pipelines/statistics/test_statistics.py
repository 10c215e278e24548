import json
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import dataset_statistics
from rollout_io import RolloutWriter, scan
from rollout_io.cli.main import run
from schemas.strategies import rollout_tables
from tests.helpers.table_helpers import write_example

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)


def test_the_worked_example_has_two_rows_of_one_trajectory(tmp_path):
    path = write_example(tmp_path)
    assert dataset_statistics(path) == {
        "num_rows": 2,
        "num_tokens": 8,
        "num_prompt_tokens": 6,
        "num_response_tokens": 2,
        "num_trained_tokens": 2,
        "num_rows_without_logprobs": 2,
        "rows_per_trajectory_mean": 2.0,
        "rows_per_trajectory_max": 2,
        "prompt_tokens_per_row_mean": 3.0,
        "prompt_tokens_per_row_max": 4,
        "response_tokens_per_row_mean": 1.0,
        "response_tokens_per_row_max": 1,
        "num_trajectories": 1,
        "num_groups": 1,
        "num_groups_with_variance": 0,
        "num_failed": 0,
        "num_unknown_reward": 1,
        "reward_mean": None,
        "reward_min": None,
        "reward_max": None,
        "stop_reasons": {},
    }


@relaxed
@given(rollout_tables(), st.sampled_from(["prefix", "full"]), st.sampled_from(["last", "sum"]))
def test_a_dataset_in_either_layout_has_the_statistics_of_its_table(table, layout, outcome):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        with RolloutWriter(path, layout=layout, row_group_rows=2) as writer:
            writer.write(table)
        from_path = dataset_statistics(path, outcome)
        assert from_path == dataset_statistics(scan(path), outcome)
    assert from_path == dataset_statistics(table, outcome)


@relaxed
@given(rollout_tables())
def test_counts_are_those_of_the_rows_spelled_out(table):
    found, rows = dataset_statistics(table), table.to_pylist()
    responses = [len(row["response_ids"]) for row in rows]
    failed = {row["trajectory_id"] for row in rows if row.get("error") is not None}
    assert found["num_rows"] == len(rows)
    assert found["num_prompt_tokens"] == sum(len(row["prompt_token_ids"]) for row in rows)
    assert found["num_response_tokens"] == sum(responses)
    assert found["num_trained_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert found["num_rows_without_logprobs"] == sum(
        row.get("rollout_logprobs") is None and num > 0
        for row, num in zip(rows, responses, strict=True)
    )
    assert found["response_tokens_per_row_max"] == max(responses, default=None)
    assert found["num_trajectories"] == len({row["trajectory_id"] for row in rows})
    assert found["num_groups"] == len({row["instance_id"] for row in rows})
    assert found["num_failed"] == len(failed)


def test_stats_are_printed_section_by_section(shop_dataset, capsys):
    assert run(["stats", str(shop_dataset)]) == 0
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        *("rows", "trajectories", "rewards", "stop reasons of rows"),
        *("per step", "per trajectory", "per group"),
        "savings: tokens that each layout forwards",
    ]
    assert ["reward_mean", "0.25"] in [line.split() for line in printed.splitlines()]


def test_stats_as_json_keep_the_numbers_of_the_dataset_at_the_top(shop_dataset, capsys):
    assert run(["stats", str(shop_dataset), "--json", "--outcome", "sum"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) - {"metrics", "savings"} == set(dataset_statistics(shop_dataset))


def test_stats_of_a_model_without_a_config_say_what_is_missing(shop_dataset, tmp_path, capsys):
    assert run(["stats", str(shop_dataset), "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
