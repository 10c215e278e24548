"""`rollouts plot`: curves as an image, and what is refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from rollout_io.cli.main import run as main
from schemas.errors import RolloutError
from tests.conftest import ROOT
from trainer.cli.train import plot as verb
from trainer.reports.run_plot import DEFAULT, curve, plot_runs, read_metrics, runs_figure, smoothed

NO_TORCH = """
import sys
from pathlib import Path
from trainer.reports.run_plot import plot_runs

plot_runs([Path(sys.argv[1])], Path(sys.argv[2]))
assert "torch" not in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""


def make_run(path, num_updates=3, **values):
    path.mkdir(parents=True)
    lines = [
        {"global_step": step, "loss": 1 / step, "return_mean": None, "skipped": 0} | values
        for step in range(1, num_updates + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def colors_of(image):
    found = Image.open(image).convert("RGB").getcolors(1 << 24)
    return {color for _, color in found or []}


BLUE, ORANGE = (31, 119, 180), (255, 127, 14)


@pytest.mark.slow
def test_runs_are_drawn_over_each_other_in_colors_of_their_own(tmp_path):
    one, two = (make_run(tmp_path / name, grad_norm=0.5) for name in ("one", "two"))
    image = tmp_path / "curves.png"
    assert plot_runs([one], image) == ["loss", "grad_norm"]
    assert BLUE in colors_of(image)
    assert ORANGE not in colors_of(image)
    (two / "metrics.jsonl").write_text(
        '{"global_step": 1, "loss": 3}\n{"global_step": 2, "loss": 4}\n'
    )
    assert plot_runs([one, two], image) == ["loss", "grad_norm"]
    assert {BLUE, ORANGE} <= colors_of(image)


def records(values, metric="loss"):
    return [{"global_step": step, metric: value} for step, value in enumerate(values, 1)]


def drawn(axis):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]


def test_long_names_stay_distinct_in_the_legend():
    names = [f"{'a' * 30}{middle}{'z' * 30}" for middle in ("first", "other")]
    [legend] = runs_figure(dict.fromkeys(names, records([1.0, 2.0])), ["loss"]).legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert len(set(shown)) == 2
    assert all("…" in name for name in shown)


def test_two_updates_are_two_marked_points():
    [axis] = runs_figure({"run": records([0.5, 0.25])}, ["loss"]).axes
    assert drawn(axis) == [([1, 2], [0.5, 0.25])]
    assert axis.lines[0].get_marker() == "o"
    low, high = axis.get_xlim()
    assert [tick for tick in axis.get_xticks() if low <= tick <= high] == [1, 2]


def test_many_updates_are_faint_points_behind_a_smooth_curve():
    noise = np.random.default_rng(0).normal(size=300)
    values = (np.linspace(0, 10, 300) + noise).tolist()
    [axis] = runs_figure({"run": records(values)}, ["loss"]).axes
    raw, smooth = axis.lines
    assert list(raw.get_ydata()) == values
    assert raw.get_alpha() < 0.5 < smooth.get_linewidth()
    assert raw.get_linestyle() == "None"
    assert smooth.get_alpha() is None
    assert np.std(smooth.get_ydata() - np.linspace(0, 10, 300)) < 0.4 * np.std(noise)


@pytest.mark.parametrize("num", [41, 300, 1501])
def test_smoothing_keeps_a_line_up_to_its_ends(num):
    steps = list(range(10, 10 + num))
    places, values = smoothed(steps, [3.0 * step for step in steps])
    assert (places[0], places[-1]) == (steps[0], steps[-1])
    np.testing.assert_allclose(values, 3.0 * places)


def test_smoothing_stays_in_the_range_of_the_values():
    rewards = [*np.linspace(0, 1, 60), *[1.0] * 3]
    for values in (rewards, rewards[::-1], [1 - reward for reward in rewards]):
        _, found = smoothed(range(63), values)
        assert found.min() >= 0
        assert found.max() <= 1


def test_smoothing_leaves_values_that_are_not_finite_out():
    values = [1.0] * 60
    values[20], values[40] = float("nan"), float("inf")
    places, found = smoothed(range(60), values)
    assert (len(places), set(found.round(9))) == (58, {1.0})
    assert smoothed(range(50), [float("nan")] * 50)[0].size == 0


def test_runs_of_different_lengths_and_metrics_share_panels_and_one_legend():
    runs = {
        "short": records([1.0, 2.0]),
        "long": [line | {"policy_kl": 0.5} for line in records([3.0, 4.0, 5.0])],
    }
    figure = runs_figure(runs, ["policy_kl", "loss"])
    kl, loss = figure.axes
    assert drawn(kl) == [([1, 2, 3], [0.5, 0.5, 0.5])]
    assert drawn(loss) == [([1, 2], [1.0, 2.0]), ([1, 2, 3], [3.0, 4.0, 5.0])]
    assert [line.get_color() for line in loss.lines] == ["C0", "C1"]
    assert kl.lines[0].get_color() == "C1"
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["short", "long"]
    assert kl.get_ylabel() == "nats"


@pytest.mark.parametrize("num_updates", [1, 300])
@pytest.mark.parametrize(
    ("suffix", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")]
)
def test_the_suffix_says_the_format(suffix, magic, num_updates, tmp_path):
    run, image = make_run(tmp_path / "run", num_updates), tmp_path / f"curves.{suffix}"
    plot_runs([run], image, ["loss"])
    assert image.read_bytes().startswith(magic)


@pytest.mark.slow
def test_an_image_needs_neither_torch_nor_a_display(tmp_path):
    run, image = make_run(tmp_path / "run"), tmp_path / "curves.png"
    command = [sys.executable, "-c", NO_TORCH, str(run), str(image)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_curve_has_the_numbers_of_the_updates_that_were_made():
    records = [
        {"global_step": 0, "loss": 9.0, "skipped": 1},
        {"global_step": 1, "loss": 1.0, "skipped": 0},
        {"global_step": 2, "loss": None},
        {"global_step": 3, "loss": 2},
    ]
    assert curve(records, "loss") == ([1, 3], [1.0, 2.0])
    assert curve(records, "entropy") == ([], [])


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"global_step": 4, "note": "\xff"}\n')
    with pytest.raises(RolloutError) as raised:
        read_metrics(run)
    assert (raised.value.rule, raised.value.where) == (
        "metrics_file",
        f"{run / 'metrics.jsonl'}:4",
    )


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"global_step": 4, "lo')
    assert [record["global_step"] for record in read_metrics(run)] == [1, 2, 3]


def test_only_known_metrics_are_drawn_by_default():
    from schemas.run_metrics import LOOP_METRICS, METRICS

    assert set(DEFAULT) <= METRICS.keys() | LOOP_METRICS.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, ".*run/metrics.jsonl: the file does not exist"),
        ("", ".*: the file has no metrics yet"),
        ("{}\n", r".*metrics.jsonl:1: found '\{\}'; expected a JSON object with an integer glob"),
        ('{"global_step": 1}\nnonsense\n', ".*metrics.jsonl:2: found 'nonsense'"),
        ("[1]\n", r"metrics.jsonl:1: found '\[1\]'"),
        ('{"global_step": 0, "loss": 1.0, "skipped": 1}\n', "run: no optimizer step was taken"),
    ],
)
def test_metrics_that_are_missing_broken_or_empty_are_refused(text, message, tmp_path):
    (tmp_path / "run").mkdir()
    if text is not None:
        (tmp_path / "run" / "metrics.jsonl").write_text(text)
    with pytest.raises(RolloutError, match=message):
        plot_runs([tmp_path / "run"], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    ("image", "metric", "message"),
    [
        ("curves.png", "los", "run: metric `los` has no values"),
        ("curves.docx", "loss", ".*: found extension '.docx'; expected one of .*png"),
        ("run/metrics.jsonl/curves.png", "loss", ".*: its directory cannot be created"),
    ],
)
def test_what_cannot_be_drawn_is_refused(image, metric, message, tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(RolloutError, match=message):
        plot_runs([run], tmp_path / image, [metric])


def test_the_verb_says_what_it_drew_and_names_the_nearest_metric(tmp_path):
    run, image = make_run(tmp_path / "run"), tmp_path / "curves.png"
    done = CliRunner().invoke(verb, [str(run), "--out", str(image)], catch_exceptions=False)
    assert (done.stdout, done.stderr) == ("", f"loss -> {image}\n")
    with pytest.raises(RolloutError) as error:
        CliRunner().invoke(verb, [str(run), "--metric", "los"], catch_exceptions=False)
    assert error.value.hint == "did you mean `loss`?"


def test_the_verb_is_registered_and_a_users_error_is_one_message(tmp_path, capfd):
    assert main(["plot", str(tmp_path)]) == 1
    printed = capfd.readouterr()
    assert printed.err.startswith(f"Error: {tmp_path}/metrics.jsonl: the file does not exist")
    assert "Hint: pass a dataset, or the directory of a run" in printed.err
