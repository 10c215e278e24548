import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import rollout_io
from pipelines import trajectory_returns
from rollout_io import RolloutWriter
from rollout_io.cli.main import run
from schemas import check
from schemas.metadata import DatasetMetadata
from tests.helpers.filter_helpers import one_step, table


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "ds", *one_step(1.0, 0.0, "failed"), *one_step(0.0, 0.0, instance="b"))


def write(path, *trajectories, **metadata):
    with RolloutWriter(path, metadata=DatasetMetadata(**metadata), row_group_rows=2) as writer:
        writer.write(table(*trajectories))
    return str(path)


def rows(path):
    return rollout_io.scan(path).collect()


PANICS = "CAST(reward AS DECIMAL(99, 2))"  # Polars does not check the precision


def test_a_filtered_dataset_says_how_it_was_made_and_what_went(shop_dataset, tmp_path, capsys):
    out = str(tmp_path / "out")
    arguments = ["--drop-zero-variance", "--mask-overlong", "--out", out]
    assert run(["filter", str(shop_dataset), *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (
        "zero variance: 20 of 48 trajectories dropped, including 5 of 12 groups entirely"
        in printed.err
    )
    assert "overlong: 12 of 28 trajectories masked, including 1 of 7 groups entirely" in printed.err
    assert f"next: rollouts stats {out}" in printed.err
    assert check(rows(out)).is_empty()
    made = rollout_io.read_metadata(out).made_by[-1]
    assert made == {
        "verb": "filter",
        "parents": [str(shop_dataset)],
        "drop_zero_variance": True,
        "mask_overlong": True,
        "seed": 0,
    }
    assert (
        rollout_io.read_metadata(out).made_by[:-1] == rollout_io.read_metadata(shop_dataset).made_by
    )


def test_the_report_as_json_has_a_line_per_filter_and_mask(dataset, capsys):
    arguments = ["--drop-failed", "--drop-zero-variance", "--mask-failed-groups"]
    assert run(["filter", dataset, *arguments, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts = {
        "num_trajectories_before": 5,
        "num_trajectories_dropped": 1,
        "num_groups_before": 2,
        "num_groups_dropped": 0,
    }
    assert report["mixture"] == []
    (only,) = report["datasets"]
    assert (only["dataset"], only["rows"]) == (dataset, {})
    assert only["filters"][0] == {"filter": "failed"} | counts
    assert [line["filter"] for line in only["filters"]] == ["failed", "zero variance"]
    assert only["masks"][0]["num_trajectories_masked"] == 0


def test_a_dry_run_writes_nothing(dataset, tmp_path):
    out = tmp_path / "out"
    assert run(["filter", dataset, "--drop-failed", "--dry-run", "--out", str(out)]) == 0
    assert not out.exists()


@pytest.mark.slow
def test_the_report_of_a_dry_run_is_data_and_otherwise_a_note(dataset, tmp_path, capsys):
    line = "  failed: 1 of 5 trajectories dropped, including 0 of 2 groups entirely"
    for quiet in ([], ["-q"]):
        assert run(["filter", dataset, "--drop-failed", "--dry-run", *quiet]) == 0
        printed = capsys.readouterr()
        assert printed.out.splitlines() == [dataset, line]
        assert printed.err == ""
    assert run(["filter", dataset, "--drop-failed", "--out", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert line in printed.err.splitlines()
    assert run(["filter", dataset, "--drop-failed", "-q", "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--where", "reward = 1"], ["a_0"]),
        (["--where", "reward >= 0", "--where", "instance_id = 'b'"], ["b_0", "b_1"]),
        (["--where", "all(error IS NULL)"], ["a_0", "a_1", "b_0", "b_1"]),
        (["--drop-failed"], ["a_0", "a_1", "b_0", "b_1"]),
        (["--drop-failed-groups"], ["b_0", "b_1"]),
        (["--min-reward", "0", "--max-reward", "0.5"], ["a_1", "b_0", "b_1"]),
        (["--dedup", "dataset"], ["a_0", "a_2"]),
        (["--dedup", "group"], ["a_0", "a_2", "b_0"]),
        (["--max-tokens", "2", "--min-steps", "1"], ["a_0", "a_1", "a_2", "b_0", "b_1"]),
        (["--drop-zero-variance"], ["a_0", "a_1", "a_2"]),
        (["--best", "1"], ["a_0", "b_0"]),
        (["--best", "2"], ["a_0", "a_1", "b_0", "b_1"]),
    ],
)
def test_each_option_keeps_what_it_says(dataset, tmp_path, arguments, left):
    out = str(tmp_path / "out")
    assert run(["filter", dataset, *arguments, "--out", out]) == 0
    assert rows(out)["trajectory_id"].to_list() == left


def test_sampled_groups_are_whole(shop_dataset, tmp_path):
    out = str(tmp_path / "out")
    assert run(["filter", str(shop_dataset), "--sample-groups", "3", "--out", out]) == 0
    per_group = rows(out).group_by("instance_id").agg(pl.col("trajectory_id").n_unique())
    assert per_group["trajectory_id"].to_list() == [4, 4, 4]


def test_rows_can_be_dropped_and_the_outcome_moved(shop_dataset, tmp_path, capsys):
    out = str(tmp_path / "out")
    arguments = ["filter", str(shop_dataset), "--keep-rows", "step_index < 2", "--out", out]
    assert run(arguments) == 1
    assert "return_unchanged" in capsys.readouterr().err
    assert run([*arguments, "--move-outcome"]) == 0
    returns = trajectory_returns(rows(out)).collect()
    assert returns.equals(trajectory_returns(rollout_io.scan(shop_dataset)).collect())


@pytest.mark.slow
def test_filtering_the_merged_dataset_gives_the_same_trajectories(shop_dataset, tmp_path):
    merged, outs = str(tmp_path / "merged"), [str(tmp_path / "a"), str(tmp_path / "b")]
    assert run(["merge", str(shop_dataset), "--out", merged]) == 0
    for path, out in zip([str(shop_dataset), merged], outs, strict=True):
        arguments = ["--drop-zero-variance", "--max-steps", "4", "--dedup", "group"]
        assert run(["filter", path, *arguments, "--out", out]) == 0
    a, b = (rows(out)["trajectory_id"].unique(maintain_order=True) for out in outs)
    assert a.equals(b)
    assert len(a) < 48


def test_a_mixture_takes_shares_of_whole_groups(shop_dataset, dataset, tmp_path, capsys):
    out = str(tmp_path / "out")
    shares = ["--share", "3", "--share", "1", "--sample-groups", "4"]
    assert run(["filter", str(shop_dataset), "--mix", dataset, *shares, "--out", out]) == 0
    assert "mixture: 3 of 12 groups" in capsys.readouterr().err
    mixed = rows(out)
    assert check(mixed).is_empty()
    assert mixed["instance_id"].n_unique() == 4
    assert rollout_io.read_metadata(out).made_by[-1]["parents"] == [str(shop_dataset), dataset]


def test_filters_apply_to_each_dataset_of_a_mixture(dataset, tmp_path):
    other = write(tmp_path / "other", *one_step(0.0, 1.0, instance="c"))
    out = str(tmp_path / "out")
    assert run(["filter", dataset, "--mix", other, "--drop-zero-variance", "--out", out]) == 0
    assert set(rows(out)["instance_id"]) == {"a", "c"}


def test_datasets_of_different_tokenizers_do_not_mix(tmp_path, capsys):
    paths = [
        write(tmp_path / name, *one_step(1.0, instance=name), tokenizer_fingerprint=name)
        for name in "ab"
    ]
    out = tmp_path / "out"
    assert run(["filter", paths[0], "--mix", paths[1], "--out", str(out)]) == 1
    assert "differ in tokenizer_fingerprint" in capsys.readouterr().err
    assert not out.exists()


def test_what_datasets_do_not_say_alike_is_unknown_of_their_mixture(tmp_path):
    a = write(tmp_path / "a", *one_step(1.0), logprobs_mode="raw", tokenizer="t")
    b = write(tmp_path / "b", *one_step(1.0, instance="b"), tokenizer="t")
    out = str(tmp_path / "out")
    assert run(["filter", a, "--mix", b, "--out", out]) == 0
    metadata = rollout_io.read_metadata(out)
    assert (metadata.logprobs_mode, metadata.tokenizer) == (None, "t")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--drop-failed"], 2, "--out"),
        (["--max-staleness", "1", "--dry-run"], 2, "--policy-version"),
        (["--move-outcome", "--dry-run"], 2, "--keep-rows"),
        (["--share", "1", "--share", "2", "--dry-run"], 2, "--mix"),
        (["--min-reward", "9", "--dry-run"], 1, "nothing_left"),
        (["--where", "rewrad > 0", "--dry-run"], 1, "known_column"),
        (["--where", "reward >", "--dry-run"], 1, "condition"),
        (["--where", f"{PANICS} > 1", "--dry-run"], 1, "[condition]"),
        (["--keep-rows", f"{PANICS} > 1", "--dry-run"], 1, "[condition]"),
        (["--keep-rows", "rewrad > 0", "--dry-run"], 1, "known_column"),
        (["--mask-overlong", "--dry-run"], 1, "stop_reason"),
    ],
)
def test_what_cannot_be_done_is_said_without_a_traceback(dataset, capsys, arguments, code, text):
    assert run(["filter", dataset, *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.slow
def test_a_mixture_has_in_its_rows_what_the_histories_say_they_were_sampled_with(tmp_path):
    plain = write(tmp_path / "plain", *one_step(1.0, 0.0))
    made_by = ({"verb": "generate", "config": {"min_p": 0.1}},)
    cut = write(tmp_path / "cut", *one_step(1.0, instance="b"), made_by=made_by)
    for i, (one, other) in enumerate([(plain, cut), (cut, plain)]):
        out = str(tmp_path / f"out{i}")
        assert run(["filter", one, "--mix", other, "--out", out]) == 0
        said = {row["instance_id"]: row["sampling_extra"] for row in rows(out).to_dicts()}
        assert said == {"a": None, "b": '{"min_p":0.1}'}


def test_a_dataset_is_not_mixed_with_itself(dataset, capsys):
    assert run(["filter", dataset, "--mix", dataset, "--dry-run"]) == 1
    assert "unique_group" in capsys.readouterr().err


def test_the_input_is_never_overwritten(dataset, capsys):
    before = rows(dataset)
    assert run(["filter", dataset, "--drop-failed", "--out", dataset]) == 1
    assert "out_is_free" in capsys.readouterr().err
    assert rows(dataset).equals(before)


def test_a_row_that_the_writer_refuses_ends_the_run_and_leaves_nothing(tmp_path, capsys):
    broken = table(*(t for n in range(9) for t in one_step(0.0, 1.0, instance=f"g{n}")))
    masks = pa.array([[True]] * 17 + [[True, True]], broken.schema.field("loss_mask").type)
    index = broken.column_names.index("loss_mask")
    with RolloutWriter(tmp_path / "ds", checked=True, row_group_rows=2) as writer:
        writer.write(broken.set_column(index, broken.schema.field("loss_mask"), masks))
    out = tmp_path / "out"
    assert run(["filter", str(tmp_path / "ds"), "--drop-failed", "--out", str(out)]) == 1
    assert "lengths_align" in capsys.readouterr().err
    assert not out.exists()


def test_a_damaged_file_is_named(shop_dataset, tmp_path, capsys):
    copy = tmp_path / "ds"
    copy.mkdir()
    data = bytearray(next(Path(shop_dataset).glob("*.parquet")).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (copy / "part-00000.parquet").write_bytes(data)
    out = tmp_path / "out"
    assert run(["filter", str(copy), "--drop-zero-variance", "--out", str(out)]) == 1
    assert "readable_file" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "option",
    ["--min-pass-rate", "--max-pass-rate", "--min-reward", "--max-reward", "--dedup-similarity"],
)
def test_a_bound_that_is_no_number_is_refused(dataset, capsys, option):
    assert run(["filter", str(dataset), option, "nan", "--dry-run"]) == 2
    assert "nan is not a number" in capsys.readouterr().err
