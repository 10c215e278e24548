"""What a run says while it goes on: lines, a bar, notes, warnings, metrics."""

import json
import os
import pty
import re
import select

import numpy as np
import pyarrow as pa
import pytest
from accelerate import Accelerator

import rollout_io
import trainer
from rollout_io import RolloutWriter
from schemas.metadata import DatasetMetadata
from schemas.run_metrics import GENERATED, METRICS
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    metrics_of,
    one_group,
    step,
    write_dataset,
)
from trainer.run.metrics import generated_per
from trainer.run.run_log import RunLog, progress_line
from trainer.run.warnings import warnings_about

NOTE = "note: importance correction (tis_ratio_type) is off, because the dataset has no rollout_logprobs\n"
HINT = "Hint: pass --set data.drop_zero_variance_groups=true"


def group(name, rewards, **values):
    return one_group(np.random.default_rng(0), name, rewards, **values)


def run(path, model, rows, **settings):
    dataset = write_dataset(path / "ds", rows)
    config = train_config(dataset=dataset, model=model, out=str(path / "run"), **settings)
    trainer.train(config)


def metrics(**changes):
    values = {"global_step": 2, "loss": -0.0123, "tokens_per_s": 850.4, "seconds": 3.21}
    values["return_mean"] = 0.5
    counts = {"skipped": 0, "num_trained_tokens": 9, "num_trained_groups": 1}
    return values | counts | changes


def test_an_update_is_one_line():
    line = "update 2 of 6: loss -0.0123, return_mean 0.5, 850 tokens/s, 3.2 s"
    assert progress_line(metrics(), 6) == line
    skipped = progress_line(metrics(skipped=1, num_trained_tokens=0), 6)
    assert skipped == "mini-batch skipped: no tokens to train on"
    skipped = progress_line(metrics(skipped=1), 6)
    assert skipped == "mini-batch skipped: the gradient is not finite"


@pytest.mark.slow
def test_each_update_is_a_line_on_stderr_where_that_is_no_terminal(model, tmp_path, capsys):
    failed = [step("b", i, 0, [], [], error="timeout", is_last_step=True) for i in range(2)]
    rows = [*group("a", (1.0, 0.0)), *failed, *group("c", (1.0, 0.0))]
    run(tmp_path, model, rows, groups_per_batch=1, groups_per_mini_batch=1)
    printed = capsys.readouterr()
    assert printed.out == ""
    numbers = r"loss -?[\d.e-]+, return_mean 0\.5, \d+ tokens/s, \d+\.\d s\n"
    lines = (
        r"learning rate 1e-06 \(usual for RL of all weights\)\n",
        r"note: the dataset records neither a tokenizer .*\n",
        r"note: 8 rows of an engine without a recorded temperature .*\n",
        re.escape(NOTE),
        rf"update 1 of 3: {numbers}",
        r"note: loss 0 is normal here: .*\n",
        r"mini-batch skipped: no tokens to train on\n",
        rf"update 2 of 3: {numbers}",
        rf"recorded the tokens of 2 updates in {tmp_path}/run/tokens \(\d+ kB\)\n",
    )
    assert re.fullmatch("".join(lines), printed.err)


def test_a_terminal_gets_a_bar_and_warnings_but_no_line_per_update(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    config = train_config(dataset="ds", model="m", out=str(tmp_path))
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with RunLog(Accelerator(), config, num_planned=6) as log:
            log.write(metrics(num_trained_groups=0))
        terminal.flush()
        shown = ""
        while select.select([master], [], [], 0)[0]:
            shown += os.read(master, 1 << 16).decode()
    os.close(master)
    assert "1/6" in shown
    assert "loss -0.0123, return_mean 0.5, 850 tokens/s" in shown
    assert re.search(r"0:00:\d\d (-:--:--|\d:\d\d:\d\d) ", shown), "time gone and time left"
    assert "warning: update 2: every advantage" in shown
    assert "update 2 of 6" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "settings"), [({}, {"tis_ratio_type": None}), ({"rollout_logprobs": [-1.0] * 4}, {})]
)
def test_correction_that_is_on_or_not_asked_for_is_not_noted(
    values, settings, model, tmp_path, capsys
):
    run(tmp_path, model, group("a", (1.0, 0.0), **values), **settings)
    assert NOTE not in capsys.readouterr().err


@pytest.mark.slow
def test_log_probabilities_far_from_the_policys_are_warned_about_before_the_first_update(
    model, tmp_path, capsys
):
    rows = group("a", (1.0, 0.0), rollout_logprobs=[-20.0] * 4)
    run(tmp_path, model, rows, num_epochs=3)
    printed = capsys.readouterr().err
    assert printed.count("warning: ") == 1
    warning = printed.index("warning: rollout_logprobs differ")
    cause = printed.index("likely cause: the weights differ from the sampler's")
    hint = printed.index(f"Hint: `rollouts audit {tmp_path}/ds --weights {model}`")
    assert warning < cause < hint < printed.index("update 1 of 3")


@pytest.mark.slow
def test_log_probabilities_that_differ_only_later_are_warned_about_then(model, tmp_path, capsys):
    rows = [*group("a", (1.0, 0.0)), *group("b", (1.0, 0.0), rollout_logprobs=[-20.0] * 4)]
    settings = {"groups_per_batch": 1, "groups_per_mini_batch": 1, "tis_ratio_type": None}
    run(tmp_path, model, rows, **settings)
    printed = capsys.readouterr().err
    assert printed.count("warning: ") == 1
    assert "warning: update 2: rollout_logprobs differ" in printed


def test_log_probabilities_near_the_policys_are_not_warned_about():
    config = train_config(dataset="ds", model="m", out="o")
    for difference, names in ((0.29, []), (0.31, ["rollout_logprobs"])):
        update = metrics(rollout_logprobs_abs_diff_mean=difference)
        assert list(warnings_about(update, config)) == names


@pytest.mark.slow
def test_updates_without_gradient_are_warned_about_once_with_the_way_out(model, tmp_path, capsys):
    rows = [*group("a", (1.0, 1.0)), *group("b", (0.0, 0.0)), *group("c", (1.0, 0.0))]
    run(tmp_path, model, rows, groups_per_batch=1, groups_per_mini_batch=1)
    printed = capsys.readouterr().err
    assert printed.count("warning: ") == 1
    assert "warning: update 1: every advantage" in printed
    assert printed.count(HINT) == 1
    lines = metrics_of(tmp_path / "run")
    assert [line["grad_norm"] == 0 for line in lines] == [True, True, False]
    assert [line["num_trained_groups"] for line in lines] == [0, 0, 1]


@pytest.mark.parametrize("num_iterations", [None, 3])
def test_the_way_out_names_the_section_of_its_key(num_iterations, tmp_path, capsys):
    config = train_config(dataset="ds", model="m", out=str(tmp_path))
    with RunLog(Accelerator(), config, num_planned=6, num_iterations=num_iterations) as log:
        log.write(metrics(num_trained_groups=0))
    assert "pass --set data.drop_zero_variance_groups=true" in capsys.readouterr().err


def test_the_way_out_is_not_named_where_it_was_taken():
    config = train_config(dataset="ds", model="m", out="o", drop_zero_variance_groups=True)
    [text] = warnings_about(metrics(num_trained_groups=0), config).values()
    assert HINT not in text


@pytest.mark.slow
def test_the_ratios_of_cispo_and_importance_sampling_are_reported(model, tmp_path):
    rows = group("a", (1.0, 0.0), rollout_logprobs=[-1.0] * 4)
    bounds = {"cispo_eps_clip_low": 0.5, "cispo_eps_clip_high": 0.0}
    losses = {
        "importance_sampling": {},
        "cispo": bounds,
        "rollout": bounds | {"cispo_anchor": "rollout"},
    }
    last = {}
    for name, settings in losses.items():
        loss = "cispo" if name == "rollout" else name
        run(tmp_path / name, model, rows, policy_loss_type=loss, **settings)
        [line] = (tmp_path / name / "run/metrics.jsonl").read_text().splitlines()
        last[name] = json.loads(line)
    assert last["importance_sampling"]["importance_ratio"] == 1
    assert [last["cispo"][f"cispo/ratio_{kind}"] for kind in ("mean", "max", "min")] == [1, 1, 1]
    ratios = [
        last["rollout"][f"cispo/ratio_{kind}"] for kind in ("min", "clamped_mean", "mean", "max")
    ]
    assert ratios[0] < 0.5 <= ratios[1] <= 1
    assert ratios[0] <= ratios[2] <= ratios[3]
    assert "cispo/ratio_mean" not in last["importance_sampling"]


@pytest.mark.slow
def test_documented_metrics_are_those_written(model, tmp_path):
    rows = group("a", (1.0, 0.0), rollout_logprobs=[-1.0] * 4)
    masks = {
        "outlier_token_is_threshold_high": 1e9,
        "token_mask_is_threshold_low": 0.0,
        "token_mask_is_threshold_high": 1e9,
        "sequence_mask_metric": "geometric",
    }
    others = {
        "policy_loss_type": "cispo",
        "kl_reward_coef": 0.1,
        "tis_ratio_type": "sequence",
        "sequence_mask_metric": "product",
    }
    settings = (
        {"estimator": "gae", "kl_loss_coef": 0.1} | masks,
        others,
        {"policy_loss_type": "importance_sampling", "sequence_layout": "tree"},
    )
    written = set()
    for number, changes in enumerate(settings):
        run(tmp_path / str(number), model, rows, **changes)
        [line] = (tmp_path / f"{number}/run/metrics.jsonl").read_text().splitlines()
        written |= json.loads(line).keys()
    assert {name for name in written if not name.startswith(GENERATED)} <= METRICS.keys() <= written


def test_the_first_line_of_a_batch_has_the_metrics_of_its_turns(model, tmp_path):
    first = step("a", 0, 0, [1, 2], [3], reward=0.0, metrics=[("turns", 1.0)])
    last = step("a", 0, 1, [1, 2, 3, 4], [5, 6, 7], reward=1.0, is_last_step=True)
    rows = [first, last | {"metrics": [("turns", 3.0)]}, *group("b", (1.0, 0.0))]
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 1, "partial_groups": "train"}
    run(tmp_path, model, [{"metrics": None} | row for row in rows], **settings)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    found, second = (json.loads(line) for line in lines)
    assert found["environment/turns"] == 2.0
    assert found["generate/num_seq_before_merge"] == len(rows) == 6
    assert found["generate/num_seq_after_merge"] == found["generate/batch_num_seq"] == 3
    responses = [len(row["response_ids"]) for row in rows]
    assert found["generate/avg_num_tokens"] == pytest.approx(sum(responses) / 6)
    assert not [name for name in second if name.startswith(GENERATED)]


def test_metrics_of_a_generator_are_logged_once_a_batch_without_replacing_others(model, tmp_path):
    objects = [
        {"tool/avg_calls": 1.0, "tool/errors": 2, "loss": 9.0, "generate/avg_num_tokens": 99.0},
        {"tool/avg_calls": 3.0, "tool/errors": 3},
    ]
    rows = [*group("a", (1.0, 0.0)), *group("b", (1.0, 0.0))]
    stored = [None] * len(rows)
    stored[0], stored[-1] = map(json.dumps, objects)
    table = rollout_io.read(write_dataset(tmp_path / "plain", rows))
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table.append_column("rollout_metrics", pa.array(stored)))
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 1}
    out, dataset = str(tmp_path / "run"), str(tmp_path / "ds")
    trainer.train(train_config(dataset=dataset, model=model, out=out, **settings))
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["tool/avg_calls"] == 2.0
    assert first["tool/errors"] == 5.0
    assert first["generate/loss"] == 9.0
    assert first["loss"] != 9.0
    assert first["generate/avg_num_tokens"] != 99.0
    assert not {"tool/errors", "generate/loss"} & second.keys()


@pytest.mark.parametrize(
    ("config", "per"),
    [
        ({"history": "append"}, "trajectory"),
        ({"history": "one_message", "agent": None}, "trajectory"),
        ({"history": "step_wise"}, "step"),
        ({"history": "append", "agent": "m:f"}, "step"),
        ({"history": "append", "harness": "h"}, "step"),
        (None, "step"),
    ],
)
def test_only_step_wise_datasets_are_measured_per_step(config, per, tmp_path):
    metadata = DatasetMetadata()
    if config is not None:
        metadata = metadata.made("rl", config=config)
    plain = write_dataset(tmp_path / "plain", group("a", (1.0, 0.0)))
    with RolloutWriter(tmp_path / "ds", metadata=metadata) as writer:
        writer.write(rollout_io.read(plain))
    assert generated_per(str(tmp_path / "ds")) == per
