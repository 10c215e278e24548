"""Samples have exactly the tokens of the table, of the trajectories that were selected."""

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
import rollout_io
from pipelines.exporting.export import PICTURES
from rollout_io.cli.main import run
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import ConfigError, InputError
from schemas.strategies import rollout_tables
from tests.helpers.examples import examples
from tests.helpers.pair_helpers import attempts, exported, write

GIVEN = (
    ("a", 0.0, [([1], [2])]),
    ("a", 1.0, [([1], [3]), ([1, 3, 9], [4])]),
    ("a", 0.5, [([1], [5])]),
    ("b", None, [([1], [6])]),
    ("b", -1.0, [([1], [7])]),
)


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "ds", attempts(*GIVEN))


def names_of(samples):
    return [sample["trajectory_id"] for sample in samples]


def test_steps_that_continue_each_other_are_one_sample_without_its_environment_tokens(dataset):
    done, samples = exported(dataset, "sft_tokens")
    assert done.num_samples == 5
    assert done.remarks == ["6 rows merged into 5 sequences, which are counted"]
    (sample,) = (s for s in samples if s["trajectory_id"] == "a_1")
    assert sample["input_ids"] == [1, 3, 9, 4]
    assert sample["assistant_masks"] == [0, 1, 0, 1]
    assert sample["return"] == 1.0


@pytest.mark.parametrize(
    ("select", "names", "left_out"),
    [
        ("all", ["a_0", "a_1", "a_2", "b_0", "b_1"], {}),
        (
            "best",
            ["a_1", "b_1"],
            {"of attempts that are not the best of their group": 2, "with an unknown return": 1},
        ),
        (">=0.5", ["a_1", "a_2"], {"with a return below 0.5": 2, "with an unknown return": 1}),
        (">=-1", ["a_0", "a_1", "a_2", "b_1"], {"with an unknown return": 1}),
    ],
)
def test_a_selection_leaves_out_the_other_attempts_and_counts_them(
    select, names, left_out, dataset
):
    done, samples = exported(dataset, "sft_tokens", select)
    assert names_of(samples) == names
    assert done.left_out == left_out
    assert done.num_rows_read == 5 == done.num_rows_written + sum(left_out.values())


def test_kto_labels_each_step_by_the_mean_of_its_group_or_by_a_bar(dataset):
    done, samples = exported(dataset, "kto_tokens")
    found = [(s["prompt_ids"], s["completion_ids"], s["label"]) for s in samples]
    assert found == [([1], [2], False), ([1], [3], True), ([1, 3, 9], [4], True), ([1], [5], False)]
    assert done.left_out == {
        "with an unknown return": 1,
        "of groups whose returns do not differ": 1,
    }
    _, samples = exported(dataset, "kto_tokens", ">=0.5")
    assert [s["label"] for s in samples] == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("returns", "select", "labels"),
    [
        ((0.7, 0.1, 0.4), "mean", [True, False, False]),
        ((1 / 3, 2 / 3, 0.5), "mean", [False, True, False]),
        ((0.1 * 3, 0.3, 0.7 - 0.4, 0.2), ">=0.3", [True, True, True, False]),
    ],
)
def test_a_return_that_equals_the_bar_but_for_rounding_is_equal_to_it(
    returns, select, labels, tmp_path
):
    given = [("a", value, [([1], [2 + n])]) for n, value in enumerate(returns)]
    dataset = write(tmp_path / "ds", attempts(*given))
    _, samples = exported(dataset, "kto_tokens", select)
    assert [sample["label"] for sample in samples] == labels
    if select != "mean":
        _, samples = exported(dataset, "sft_tokens", select)
        assert len(samples) == sum(labels)


def test_a_row_that_trains_nothing_is_left_out_and_counted(tmp_path):
    given = [
        ("a", 1.0, [([1], [2, 3], [False, False])]),
        ("b", 1.0, [([1], [4, 5], [True, False])]),
    ]
    dataset = write(tmp_path / "ds", attempts(*given))
    done, samples = exported(dataset, "sft_tokens")
    assert done.left_out == {"that train no token": 1}
    assert [s["assistant_masks"] for s in samples] == [[0, 1, 0]]
    with pytest.raises(InputError, match="1 that train no token, 1 without a step whose tokens"):
        exported(dataset, "kto_tokens", ">=0")


def test_rows_with_pictures_are_left_out_and_counted(tmp_path):
    pictures = [[{"sha256": None, "start": None, "length": None}], *[None] * 5]
    table = attempts(*GIVEN, pictures=pa.array(pictures, COLUMN_BY_NAME["pictures"].type))
    done, samples = exported(write(tmp_path / "ds", table), "sft_tokens")
    assert done.left_out == {PICTURES: 1}
    assert names_of(samples) == ["a_1", "a_2", "b_0", "b_1"]


@settings(deadline=None, max_examples=examples(20))
@given(
    rollout_tables(min_trajectories=1, errors=False, user_column=False),
    st.sampled_from(["prefix", "full"]),
    st.booleans(),
)
def test_every_trained_token_is_in_one_sample_after_its_exact_prompt(table, layout, is_merged):
    if is_merged:
        table = pipelines.merge(table).collect().to_arrow()
    rows = pipelines.merge(table).collect().to_dicts()
    expected = [
        (row["prompt_token_ids"] + row["response_ids"], row["loss_mask"])
        for row in rows
        if any(row["loss_mask"]) and not row.get("pictures")
    ]
    with tempfile.TemporaryDirectory() as folder:
        dataset = write(Path(folder) / "ds", table, layout=layout)
        if not expected:
            return
        done, samples = exported(dataset, "sft_tokens")
    assert done.num_rows_read == len(rows) == done.num_rows_written + sum(done.left_out.values())
    assert [s["input_ids"] for s in samples] == [ids for ids, _ in expected]
    for sample, (ids, mask) in zip(samples, expected, strict=True):
        num = len(ids) - len(mask)
        assert sample["assistant_masks"] == [0] * num + [int(trains) for trains in mask]


@pytest.mark.parametrize("select", ["first", ">=", ">=nan", ">=inf", "forks"])
def test_an_unknown_selection_is_refused_with_those_that_exist(select, dataset):
    with pytest.raises(ConfigError, match=r"all, best, best_passing, >=X") as error:
        exported(dataset, "sft", select)
    assert error.value.rule == "choices"


def test_a_format_of_whole_datasets_takes_no_selection(dataset, capsys):
    out = str(dataset.parent / "out.json")
    command = ["export", str(dataset), "--format", "skyrl", "--out", out, "--select", "best"]
    assert run(command) == 1
    assert "run `rollouts filter` first" in capsys.readouterr().err


def test_an_empty_dataset_has_no_samples(tmp_path):
    dataset = write(tmp_path / "ds", attempts(*GIVEN).slice(0, 0))
    for name in ("sft_tokens", "dpo_tokens", "kto_tokens", "dpo"):
        with pytest.raises(InputError, match="the dataset has no rows"):
            exported(dataset, name)


def test_json_has_the_counts_of_samples_and_forks(dataset, capsys):
    out = str(dataset.parent / "pairs.parquet")
    command = ["export", str(dataset), "--format", "dpo_tokens", "--out", out, "--json"]
    assert run(command) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["num_samples"] == counts["num_forks"] == 1
    assert counts["num_forks_of_equal_return"] == 0
    assert counts["num_rows_read"] == 5
    assert counts["num_rows_written"] == 2


def test_samples_are_written_in_small_row_groups(dataset, monkeypatch, tmp_path):
    _, expected = exported(dataset, "kto_tokens", ">=0")
    monkeypatch.setattr("pipelines.exporting.export.ROW_GROUP_IDS", 3)
    out = tmp_path / "small"
    rollout_io.export(dataset, out, "kto_tokens", select=">=0")
    with pq.ParquetFile(out) as file:
        assert file.num_row_groups == 3
        assert file.read().to_pylist() == expected


def test_messages_with_redacted_answers_are_left_out_and_token_formats_keep_them(tmp_path):
    given = [("a", 1.0, [([1], [2, 3], [True, False])]), ("b", 1.0, [([1], [4, 5])])]
    table = attempts(
        *given,
        redacted=pa.array([[False, True], None], pa.list_(pa.bool_())),
        messages=pa.array([json.dumps([{"role": "user", "content": "key?"}])] * 2),
        response_text=pa.array(["it is [REDACTED_0]", "no"]),
    )
    dataset = write(tmp_path / "ds", table)
    for name in ("sft", "sharegpt", "openai_sft"):
        done, samples = exported(dataset, name)
        assert "[REDACTED" not in str(samples)
        assert len(samples) == 1
        assert list(done.left_out.values()) == [1]
        assert "1 with redacted answers" in done.text()
    done, samples = exported(dataset, "sft_tokens")
    assert [s["assistant_masks"] for s in samples] == [[0, 1, 0], [0, 1, 1]]
    assert done.left_out == {}


def test_an_export_without_a_row_names_what_is_missing(tmp_path):
    failed = attempts(("a", None, [([1], [2])]), error=pa.array(["timeout"]))
    with pytest.raises(InputError, match="every trajectory failed") as error:
        exported(write(tmp_path / "failed", failed), "sft_tokens", failed="trajectory")
    assert not error.value.hint
    both = attempts(
        ("a", None, [([1], [2])]), ("a", 1.0, [([1], [2])]), error=pa.array(["timeout", None])
    )
    with pytest.raises(InputError, match="every group has a failed") as error:
        exported(write(tmp_path / "group", both), "sft_tokens", failed="group")
    assert "--failed trajectory" in error.value.hint


def test_best_counts_what_did_not_pass_and_best_passing_leaves_it_out(tmp_path):
    given = [
        ("a", 0.0, [([1], [2]), ([9], [3])]),
        ("a", -1.0, [([1], [4])]),
        ("b", 1.0, [([1], [5])]),
    ]
    dataset = write(tmp_path / "ds", attempts(*given))
    done, samples = exported(dataset, "sft_tokens", "best")
    assert [s["trajectory_id"] for s in samples] == ["a_0", "a_0", "b_0"]
    assert done.counts == {"num_attempts_not_passing": 1, "num_samples_not_passing": 2}
    assert "67% of the samples" in " ".join(done.remarks)
    done, samples = exported(dataset, "sft_tokens", "best_passing")
    assert [s["trajectory_id"] for s in samples] == ["b_0"]
    assert done.left_out["of groups that no attempt passed"] == 2
