import json
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import dataset_statistics, merge
from pipelines.statistics.summary import (
    Distribution,
    conversion_notes,
    dataset_summary,
    length_distributions,
    reward_distribution,
)
from rollout_io import RolloutWriter, scan
from rollout_io.cli.main import run
from rollout_io.formats.trainers import NO_IDS, TOOL_RESULTS
from schemas.metadata import CONVERSION
from schemas.strategies import rollout_tables
from tests.conftest import EXAMPLES
from tests.helpers.examples import examples
from tests.helpers.filter_helpers import one_step, table
from tests.helpers.table_helpers import write_example

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(40)
)


def test_the_worked_example_has_two_rows_of_one_trajectory(tmp_path):
    path = write_example(tmp_path)
    assert dataset_statistics(path) == {
        "num_rows": 2,
        "num_tokens": 8,
        "num_prompt_tokens": 6,
        "num_response_tokens": 2,
        "num_environment_tokens": 0,
        "num_trained_tokens": 2,
        "num_pictures": 0,
        "num_picture_tokens": 0,
        "num_rows_without_logprobs": 2,
        "num_rows_retokenized": 0,
        "rows_per_trajectory_mean": 2.0,
        "rows_per_trajectory_max": 2,
        "prompt_tokens_per_row_mean": 3.0,
        "prompt_tokens_per_row_max": 4,
        "response_tokens_per_row_mean": 1.0,
        "response_tokens_per_row_max": 1,
        "num_trajectories": 1,
        "num_groups": 1,
        "num_groups_with_variance": 0,
        "num_groups_with_failed": 0,
        "num_failed": 0,
        "num_unknown_reward": 1,
        "reward_mean": None,
        "reward_min": None,
        "reward_max": None,
        "stop_reasons": {},
    }


@pytest.mark.slow
@relaxed
@given(rollout_tables(), st.sampled_from(["consecutive", "lineage"]))
def test_merging_moves_response_tokens_to_no_other_count(table, rule):
    """What a merge places between steps was in prompts; the others are no longer repeated."""
    steps, merged = dataset_statistics(table), dataset_statistics(merge(table, rule))
    for name in ("num_response_tokens", "num_trained_tokens", "num_trajectories", "reward_mean"):
        assert merged[name] == steps[name], name
    parts = ("num_prompt_tokens", "num_response_tokens", "num_environment_tokens")
    assert merged["num_tokens"] == sum(merged[name] for name in parts) <= steps["num_tokens"]
    lengths = [length_distributions(dataset_summary(data)) for data in (table, merge(table, rule))]
    name = "responses of a trajectory"
    assert lengths[0][name] == lengths[1][name]


@pytest.mark.slow
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
    spans = [row.get("segments") for row in rows]
    sampled = [
        num if own is None else sum(span["length"] for span in own)
        for num, own in zip(responses, spans, strict=True)
    ]
    assert found["num_response_tokens"] == sum(sampled)
    assert found["num_environment_tokens"] == sum(responses) - sum(sampled)
    assert found["num_trained_tokens"] == sum(
        sum(row["loss_mask"]) for row in rows if row["trajectory_id"] not in failed
    )
    entries = [entry for row in rows for entry in row.get("pictures") or ()]
    lengths = [entry["length"] for entry in entries]
    assert found["num_pictures"] == len(entries)
    assert found["num_picture_tokens"] == (None if None in lengths else sum(lengths))
    assert found["num_rows_without_logprobs"] == sum(
        row.get("rollout_logprobs") is None and num > 0
        for row, num in zip(rows, responses, strict=True)
    )
    assert found["response_tokens_per_row_max"] == max(responses, default=None)
    assert found["num_trajectories"] == len({row["trajectory_id"] for row in rows})
    assert found["num_groups"] == len({row["instance_id"] for row in rows})
    assert found["num_failed"] == len(failed)
    instances = {row["instance_id"] for row in rows if row["trajectory_id"] in failed}
    assert found["num_groups_with_failed"] == len(instances)


def test_all_numbers_are_printed_section_by_section(shop_dataset, capsys):
    assert run(["stats", str(shop_dataset), "--all"]) == 0
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        *("rows", "trajectories", "rewards", "stop reasons of rows"),
        *("per step", "per trajectory", "per group"),
        "savings: tokens that each layout forwards",
    ]
    assert ["reward_mean", "0.25"] in [line.split() for line in printed.splitlines()]


def test_stats_print_one_screen_in_words(shop_dataset, capsys):
    assert run(["stats", str(shop_dataset)]) == 0
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[0] == str(shop_dataset)
    assert len(lines) <= 40
    assert max(map(len, printed.splitlines())) <= 100
    assert "205 rows of 48 trajectories in 12 groups, 0 failed" in lines
    assert "response of a row 47.5 61 64 64 ▁▁▁▁▁▁▁▁▁▁▁█" in lines
    assert "mean 0.25, 25.0% solved (reward 1)" in lines
    assert f"1 12 {'█' * 10}" in lines
    assert (
        "groups: 7 with different rewards, 5 with equal rewards (no gradient from group baselines)"
        in lines
    )
    assert [line.split()[:4] for line in lines[-3:]] == [
        ["step", "205", "43,897", "100.0%"],
        ["merge", "82", "19,536", "44.5%"],
        ["tree", "12", "13,896", "31.7%"],
    ]
    assert "_" not in printed.removeprefix(lines[0]).replace("sequence_layout", "")


def test_the_screen_counts_the_groups_that_a_failed_trajectory_takes_out_of_training(
    tmp_path, capsys
):
    assert run(["convert", str(EXAMPLES / "harbor"), "--out", str(tmp_path / "ds")]) == 0
    assert run(["stats", str(tmp_path / "ds")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "21 rows of 12 trajectories in 3 groups, 3 failed" in lines
    assert (
        "2 groups with failed trajectories, left out of training by default "
        "(--set data.failed=trajectory leaves out only the trajectories)" in " ".join(lines)
    )


def test_the_screen_shows_no_control_characters_of_the_data(shop_dataset, tmp_path, capsys):
    rows = scan(shop_dataset).with_columns(stop_reason=pl.lit("\x1b[31mred\n\rX")).collect()
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(rows)
    assert run(["stats", str(tmp_path / "ds")]) == 0
    assert "stop reasons: \\x1b[31mred \\rX 205" in capsys.readouterr().out


@pytest.mark.slow
@settings(relaxed, max_examples=examples(10))
@given(rollout_tables(pictures=False))
def test_the_screen_of_any_dataset_agrees_with_its_statistics(table):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        with RolloutWriter(path) as writer:
            writer.write(table)
        summary = dataset_summary(path)
        with redirect_stdout(StringIO()) as printed:
            assert run(["stats", str(path)]) == 0
            assert run(["diff", str(path), str(path)]) == int(not table.num_rows)
    lengths, rewards = length_distributions(summary), reward_distribution(summary)
    prompt, rows = lengths["prompt of a row"], summary.numbers["num_rows"]
    assert (prompt.mean, prompt.max) == (
        summary.numbers["prompt_tokens_per_row_mean"],
        summary.numbers["prompt_tokens_per_row_max"],
    )
    assert sum(prompt.counts) == rows
    known = summary.numbers["num_trajectories"] - summary.numbers["num_unknown_reward"]
    assert rewards.num_known == known - summary.numbers["num_failed"]
    assert rewards.num_varied == summary.numbers["num_groups_with_variance"]
    num_groups = rewards.num_varied + rewards.num_equal + rewards.num_single
    assert num_groups == summary.numbers["num_groups"]
    assert f"{rows:,} row" in printed.getvalue()


def test_quantiles_are_values_that_occur():
    found = Distribution.of(pl.Series(range(1, 101)))
    assert (found.median, found.p95, found.max) == (50, 95, 100)


def test_stats_as_json_keep_the_numbers_of_the_dataset_at_the_top(shop_dataset, capsys):
    assert run(["stats", str(shop_dataset), "--json", "--outcome", "sum"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) - {"metrics", "savings", "tools", "findings", "conversion_notes"} == set(
        dataset_statistics(shop_dataset)
    )


@pytest.mark.model
def test_stats_repeat_what_the_conversion_noted_about_the_logs(smollm2_dir, tmp_path, capsys):
    lines = [{"input": "user\n6?", "output": text, "score": 1.0, "step": 3} for text in ("6", "7")]
    lines[0]["output"] += "\n<tool_response>\n6"
    log, dataset = tmp_path / "3.jsonl", str(tmp_path / "ds")
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["convert", str(log), "--out", dataset, "--tokenizer", str(smollm2_dir)]) == 0
    capsys.readouterr()
    assert run(["stats", dataset, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["conversion_notes"] == {NO_IDS: 2, TOOL_RESULTS: 1}
    for flags in ([], ["--all"]):
        assert run(["stats", dataset, *flags]) == 0
        assert f"{TOOL_RESULTS}: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "record", ["[]", "{}", '{"counts": 1}', '{"counts": {"notes": {"a": []}}}']
)
def test_a_record_that_no_conversion_wrote_has_no_notes(record, shop_dataset, tmp_path):
    (shard,) = shop_dataset.glob("*.parquet")
    table = pq.read_table(shard)
    pq.write_table(table.replace_schema_metadata({CONVERSION: record}), tmp_path / shard.name)
    assert conversion_notes(tmp_path / shard.name) == {}


def test_stats_of_a_model_without_a_config_say_what_is_missing(shop_dataset, tmp_path, capsys):
    assert run(["stats", str(shop_dataset), "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize("is_merged", [False, True])
def test_stats_loads_no_library_that_it_does_not_need(shop_dataset, tmp_path, flags, is_merged):
    dataset = shop_dataset
    if is_merged:
        dataset = tmp_path / "merged"
        assert run(["merge", str(shop_dataset), "--out", str(dataset)]) == 0
    code = (
        "import sys; from rollout_io.cli.main import run; assert run(sys.argv[1:]) == 0;"
        "print([m for m in ('pandas', 'datasets', 'torch', 'transformers', 'matplotlib', 'ray', "
        "'multiprocessing.connection', 'jinja2', 'pyarrow.dataset', 'sqlite3')"
        "if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, "stats", str(dataset), *flags]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.endswith("[]\n")


def test_returns_whose_sum_overflows_have_a_mean_and_bars(tmp_path, capsys):
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table(*one_step(1.7e308, 1.6e308, 1.5e308, -1e308, 0.5, 1.0, 2.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(["stats", str(tmp_path / "ds")]) == 0
        assert run(["stats", str(tmp_path / "ds"), "--json"]) == 0
    printed, found = capsys.readouterr().out.split("{", 1)
    assert "mean 5.429e+307" in printed
    numbers = json.loads("{" + found)
    assert numbers["reward_mean"] == pytest.approx(3.8 / 7 * 1e308)
    assert numbers["metrics"]["trajectory"]["avg_score"]["value"] == pytest.approx(3.8 / 7 * 1e308)


def test_returns_that_differ_by_rounding_share_a_bar():
    values = [0.3 + n * 2**-54 for n in range(9)]
    frame = pl.from_arrow(table(*one_step(*values))).lazy()
    assert reward_distribution(dataset_summary(frame)).bars == (("0.3", 9),)
