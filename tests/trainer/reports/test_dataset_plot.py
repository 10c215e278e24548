"""`rollouts plot DS`: what is drawn are the numbers of the table."""

import dataclasses
import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from PIL import Image

import rollout_io
from pipelines.drift_diagnosis.diagnosis import Report, diagnose_dataset
from pipelines.statistics.savings import dataset_savings
from rollout_io.cli.main import run
from rollout_io.dataset.parallel import Workers
from tests.helpers.table_helpers import write_example
from trainer.reports.dataset_plot import LAYOUTS, DatasetStatistics, dataset_figure, group_rewards
from trainer.reports.run_plot import GREY


@pytest.fixture(scope="module")
def shop(shop_dataset):
    return DatasetStatistics.of(str(shop_dataset), "shop", Workers())


def heights(axis):
    return [patch.get_height() for patch in axis.patches]


def binned(axis, lengths):
    """Count the lengths in the bins that a histogram drew."""
    return [
        int(((lengths >= bar.get_x()) & (lengths < bar.get_x() + bar.get_width())).sum())
        for bar in axis.patches
    ]


def rewrite(source, out, *columns):
    """Write a dataset anew with other values of some columns."""
    frame = rollout_io.scan(source).with_columns(*columns).collect()
    with rollout_io.RolloutWriter(out) as writer:
        writer.write(frame)
    return str(out)


@pytest.mark.slow
def test_histograms_count_the_rows_of_the_table(shop, shop_dataset):
    prompts, responses, rows = dataset_figure([shop]).axes[:3]
    frame = rollout_io.scan(shop_dataset).select("prompt_token_ids", "response_ids").collect()
    prompt, response = (frame[name].list.len() for name in frame.columns)
    for axis, lengths in ((prompts, prompt), (responses, response), (rows, prompt + response)):
        assert heights(axis) == binned(axis, lengths)
        assert sum(heights(axis)) == 205
        assert axis.get_xlabel() == "tokens"


def test_the_cut_off_of_training_is_marked_and_counted(shop, shop_dataset):
    rows = dataset_figure([shop], max_row_tokens=400).axes[2]
    assert list(rows.lines[0].get_xdata()) == [400, 400]
    frame = rollout_io.scan(shop_dataset)
    lengths = pl.col("prompt_token_ids").list.len() + pl.col("response_ids").list.len()
    num = frame.select((lengths > 400).sum()).collect().item()
    assert num > 0
    assert f"{num} of 205 rows beyond max_row_tokens = 400" in [t.get_text() for t in rows.texts]


def test_each_group_has_its_mean_and_its_range(shop, shop_dataset):
    axis = dataset_figure([shop]).axes[3]
    last = rollout_io.scan(shop_dataset).filter(pl.col("is_last_step"))
    groups = (
        last.group_by("instance_id")
        .agg(mean=pl.col("reward").mean(), low=pl.col("reward").min(), high=pl.col("reward").max())
        .collect()
    )
    expected = dict(groups.select("instance_id", "mean").rows())
    names = [label.get_text() for label in axis.get_xticklabels()]
    means = {
        names[int(x)]: y
        for line in axis.lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert means == expected
    assert [means[name] for name in names] == sorted(expected.values(), reverse=True)
    varied = set(groups.filter(pl.col("low") < pl.col("high"))["instance_id"])
    [ranges] = axis.collections
    assert {names[int(segment[0][0])] for segment in ranges.get_segments()} == varied
    assert all(segment[:, 1].tolist() == [0, 1] for segment in ranges.get_segments())


def test_breaks_are_stacked_by_turn_and_cause(shop, shop_dataset):
    axis = dataset_figure([shop]).axes[4]
    report = Report.of(diagnose_dataset(shop_dataset), limit=0)
    drawn = {
        (round(bar.get_x() + bar.get_width() / 2), bars.get_label().replace(" ", "_")): int(
            bar.get_height()
        )
        for bars in axis.containers
        for bar in bars
        if bar.get_height()
    }
    expected = {
        (row["step_index"], row["cause"]): row["num_breaks"]
        for row in report.by("step_index", "cause")
    }
    assert {key: num for key, num in drawn.items() if key[1] != "continues"} == expected
    assert sum(drawn.values()) == report.num_following == 157
    assert report.num_breaks == 41


def test_bars_of_layouts_are_their_tokens(shop, shop_dataset):
    axis = dataset_figure([shop]).axes[5]
    costs = dataset_savings(shop_dataset)
    assert [bar.get_width() for bar in axis.patches] == [costs[n].num_tokens for n in LAYOUTS]
    assert [text.get_text() for text in axis.texts][:2] == ["100%", "45%"]


def test_datasets_are_drawn_over_each_other_as_shares(shop, shop_dataset, tmp_path):
    out = str(tmp_path / "solvable")
    assert run(["filter", str(shop_dataset), "--drop-zero-variance", "--out", out, "-q"]) == 0
    kept = DatasetStatistics.of(out, "solvable", Workers())
    figure = dataset_figure([shop, kept])
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["shop", "solvable"]
    shares = [sum(stairs.get_data().values) for stairs in figure.axes[0].patches]
    assert shares == pytest.approx([1.0] * 4)
    profiles = [stairs.get_data().values.tolist() for stairs in figure.axes[3].patches]
    assert [len(means) for means in profiles] == [12, 7]
    assert profiles[1] == [mean for mean in profiles[0] if mean > 0]
    turns, breaks = figure.axes[4].lines[0].get_data()
    expected = {
        turn: sum(n for (t, _), n in shop.breaks.items() if t == turn) / num
        for turn, num in shop.num_following.items()
    }
    assert dict(zip(turns, breaks, strict=True)) == expected


def test_a_dataset_without_rewards_is_drawn(shop_dataset, tmp_path):
    out = rewrite(shop_dataset, tmp_path / "ds", pl.lit(None, pl.Float64).alias("reward"))
    axis = dataset_figure([DatasetStatistics.of(out, "ds", Workers())]).axes[3]
    assert [text.get_text() for text in axis.texts] == ["no trajectory has a reward"]
    assert not axis.lines


def test_steps_without_a_prompt_are_counted_as_drift_counts_them(tmp_path):
    rows = pa.table(
        {
            "instance_id": ["a"] * 4,
            "repetition_id": pa.array([0] * 4, pa.int32()),
            "trajectory_id": ["a_0"] * 4,
            "step_index": pa.array([0, 1, 2, 3], pa.int32()),
            "is_last_step": [False, False, False, True],
            "prompt_token_ids": pa.array([[1, 2], [], [1, 2, 3, 9], []], pa.list_(pa.int32())),
            "response_ids": pa.array([[3], [], [4], []], pa.list_(pa.int32())),
            "loss_mask": pa.array([[True], [], [True], []], pa.list_(pa.bool_())),
            "token_source": ["engine"] * 4,
            "error": ["timeout"] * 4,
        }
    )
    path = tmp_path / "failed"
    with rollout_io.RolloutWriter(path) as writer:
        writer.write(rows)
    picture = DatasetStatistics.of(str(path), "failed", Workers())
    report = Report.of(diagnose_dataset(path))
    assert picture.num_following == {2: 1}
    assert (report.num_following, report.num_breaks) == (1, 1)
    [*_, drift, _] = dataset_figure([picture]).axes
    assert "1 of 1 step following another, by cause" in [t.get_text() for t in drift.texts]


def test_an_unknown_image_format_is_refused_before_datasets_are_checked(
    shop_dataset, tmp_path, capfd
):
    broken = shutil.copytree(shop_dataset, tmp_path / "broken")
    next(broken.glob("*.parquet")).write_bytes(b"no table")
    assert run(["plot", str(broken), "--out", str(tmp_path / "image.foo")]) == 1
    assert "found extension '.foo'" in capfd.readouterr().err


def test_one_trajectory_of_one_step_is_drawn(tmp_path):
    write_example(tmp_path)
    first = rollout_io.scan(tmp_path / "ds").collect().head(1).with_columns(is_last_step=True)
    with rollout_io.RolloutWriter(tmp_path / "one") as writer:
        writer.write(first)
    figure = dataset_figure([DatasetStatistics.of(str(tmp_path / "one"), "one", Workers())])
    assert [sum(heights(axis)) for axis in figure.axes[:3]] == [1, 1, 1]
    assert "no step follows another" in [text.get_text() for text in figure.axes[4].texts]


def test_groups_of_unknown_rewards_are_left_out():
    returns = pl.DataFrame(
        {
            "instance_id": ["a", "a", "b", "c", "c", "d", "d"],
            "return": [0.0, 1.0, None, 0.5, None, 0.2, 0.2],
            "error": [None, None, "gone", None, "gone", None, None],
        }
    )
    assert group_rewards(returns).rows() == [
        ("a", 0.5, 0.0, 1.0, False, False),
        ("c", 0.5, 0.5, 0.5, False, True),
        ("d", 0.2, 0.2, 0.2, True, False),
    ]


def test_a_group_with_one_known_reward_is_grey_and_counted(shop):
    groups, values = ["a", "b", "b", "c", "c"], [1.0, 0.0, 1.0, None, 0.5]
    returns = pl.DataFrame(
        {"instance_id": groups, "return": values, "error": [None] * 5},
        {"instance_id": pl.String, "return": pl.Float64, "error": pl.String},
    )
    summary = dataclasses.replace(shop.summary, returns=returns)
    axis = dataset_figure([dataclasses.replace(shop, summary=summary)]).axes[3]
    detail = "1 with different rewards, 0 equal (grey), 2 with one known reward"
    assert detail in [text.get_text() for text in axis.texts]
    names = [label.get_text() for label in axis.get_xticklabels()]
    drawn = {line.get_color(): {names[int(x)] for x in line.get_xdata()} for line in axis.lines}
    assert drawn == {"C0": {"b"}, GREY: {"a", "c"}}
    assert len(axis.collections[0].get_segments()) == 1


@pytest.mark.slow
def test_the_verb_draws_a_dataset_or_runs_but_not_both(shop_dataset, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shop_dataset, "runs/shop")
    assert run(["plot", "runs/shop/"]) == 0
    assert capfd.readouterr().err == "lengths, rewards, drift, layouts -> runs/shop.png\n"
    assert [path.name for path in Path().iterdir()] == ["runs"]
    with Image.open("runs/shop.png") as image:
        assert image.size[0] > 800
    shutil.copytree(shop_dataset, "shop")
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"global_step": 1, "loss": 1.0}\n')
    for wrong, message in (
        (["run", "shop"], "either runs or datasets"),
        (["shop", "--metric", "loss"], "--metric applies to runs"),
        (["run", "--max-row-tokens", "5"], "--max-row-tokens applies to datasets"),
        (["run", "run"], "the image of several runs or datasets needs --out"),
        (["shop", "runs/shop"], "the image of several runs or datasets needs --out"),
    ):
        assert run(["plot", *wrong]) == 2
        assert message in capfd.readouterr().err
    assert run(["plot", "run"]) == 0
    assert Path("run/curves.png").exists()
    assert not Path("curves.png").exists()
