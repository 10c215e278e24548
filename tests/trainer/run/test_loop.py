"""`train` from a dataset on disk to a checkpoint, on a tiny random Llama."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import trainer
from schemas.errors import RolloutError
from tests.helpers.configs import PLACES, train_config
from tests.helpers.trainer_helpers import (
    group_rows,
    metrics_of,
    plain_logprobs,
    save_tiny_model,
    step,
    two_step_trajectory,
    write_dataset,
)
from trainer.cli.train import train as train_verb
from trainer.run.checkpoint import save_checkpoint

REWARDS = (1.0, 0.0, 0.0, 1.0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "ds", group_rows(3, REWARDS))


def run(dataset, model, out, **settings):
    defaults = {
        "tokens_per_micro_batch": 64,
        "weight_decay": 0.0,
        "learning_rate": 1e-3,
        "partial_groups": "train",
    }
    return trainer.train(
        train_config(dataset=dataset, model=model, out=str(out), **(defaults | settings))
    )


def weights(path):
    loaded = AutoModelForCausalLM.from_pretrained(path)
    return torch.cat([p.detach().flatten() for p in loaded.parameters()])


def mean_logprob(model, rows, reward):
    """Per group, the mean log-probability of the trajectories that earned `reward`."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    outcome = {r["trajectory_id"]: r["reward"] for r in rows if r["is_last_step"]}
    means = {}
    for group in dict.fromkeys(r["instance_id"] for r in rows):
        chosen = [
            (r["prompt_token_ids"], r["response_ids"], r["loss_mask"])
            for r in rows
            if r["instance_id"] == group and outcome[r["trajectory_id"]] == reward
        ]
        with torch.no_grad():
            means[group] = float(plain_logprobs(loaded, chosen).mean())
    return means


@pytest.mark.slow
def test_rewarded_trajectories_gain_on_the_others_in_every_group(dataset, model, tmp_path):
    result = run(dataset, model, tmp_path, groups_per_batch=1, groups_per_mini_batch=1)
    assert result.num_updates == 3
    rows = group_rows(3, REWARDS)
    gains = {
        reward: {
            group: after - mean_logprob(model, rows, reward)[group]
            for group, after in mean_logprob(result.checkpoint, rows, reward).items()
        }
        for reward in (1.0, 0.0)
    }
    assert all(gains[1.0][group] > gains[0.0][group] for group in gains[1.0])


def test_run_directory_holds_config_metrics_and_checkpoints(dataset, model, tmp_path):
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 1, "save_every_updates": 2}
    result = run(dataset, model, tmp_path, **settings)
    assert json.loads((tmp_path / "config.json").read_text())["batch"]["groups_per_batch"] == 2
    lines = metrics_of(tmp_path)
    assert [line["global_step"] for line in lines] == [1, 2, 3]
    assert lines[-1] == json.loads(json.dumps(result.metrics))
    assert lines[0]["num_trained_tokens"] == 4 * 8
    assert lines[0]["return_mean"] == 0.5
    assert (lines[0]["num_groups"], lines[0]["num_trajectories"], lines[0]["num_rows"]) == (1, 4, 4)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["global_step_2", "global_step_3", "latest"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step_3\n"


def test_a_second_epoch_over_one_mini_batch_weighs_by_the_policy_before_the_first(
    dataset, model, tmp_path
):
    run(dataset, model, tmp_path, policy_loss_type="importance_sampling", epochs_per_batch=2)
    first, second = (line["importance_ratio"] for line in metrics_of(tmp_path))
    assert first == pytest.approx(1.0, abs=1e-6)
    assert abs(second - 1.0) > 1e-3


def test_last_update_is_saved_once(dataset, model, tmp_path):
    result = run(dataset, model, tmp_path, save_every_updates=1)
    assert Path(result.checkpoint).name == "global_step_1"
    assert len(list((tmp_path / "checkpoints").glob("global_step_*"))) == 1


def test_failed_group_makes_no_update_and_is_counted(model, tmp_path):
    failed = step("g9", 1, 0, [], [], error="timeout", is_last_step=True)
    rng = np.random.default_rng(5)
    rows = [*group_rows(1, REWARDS), *two_step_trajectory(rng, "g9", 0, 1.0), failed]
    dataset = write_dataset(tmp_path / "ds", rows)
    result = run(dataset, model, tmp_path / "run", groups_per_batch=1, groups_per_mini_batch=1)
    assert (result.num_updates, result.num_skipped_updates, result.num_failed) == (1, 1, 1)
    last = metrics_of(tmp_path / "run")[-1]
    assert (last["num_failed"], last["num_masked"], last["num_trained_tokens"]) == (1, 2, 0)


def test_sampler_correction_is_applied_and_reported(model, tmp_path):
    rows = group_rows(1, REWARDS, rollout_logprobs=[-1.0] * 4)
    dataset = write_dataset(tmp_path / "ds", rows, logprobs_mode="raw")
    corrected = run(dataset, model, tmp_path / "a").metrics
    plain = run(dataset, model, tmp_path / "b", tis_ratio_type=None).metrics
    assert corrected["is_ratio_mean"] < 1
    assert corrected["loss"] != pytest.approx(plain["loss"])
    assert "is_ratio_mean" not in plain
    difference = "rollout_logprobs_abs_diff_mean"
    assert corrected[difference] == pytest.approx(plain[difference])


def test_bfloat16_forward_keeps_float32_weights(dataset, model, tmp_path):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        settings = {"dtype": "bfloat16", "gradient_checkpointing": True, "max_updates": 1}
        result = run(dataset, model, tmp_path / "bf16", **settings)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    reference = run(dataset, model, tmp_path / "f32", max_updates=1)
    assert weights(result.checkpoint).dtype == torch.float32
    assert result.metrics["policy_entropy"] != reference.metrics["policy_entropy"]
    assert result.metrics["policy_entropy"] == pytest.approx(
        reference.metrics["policy_entropy"], rel=0.02
    )


def test_tracker_that_is_not_installed_is_refused(dataset, model, tmp_path):
    with pytest.raises(RolloutError, match="trackers: found `papyrus`"):
        run(dataset, model, tmp_path, trackers=("papyrus",))


def test_existing_run_is_refused_and_left_alone(dataset, model, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("kept\n")
    with pytest.raises(
        RolloutError, match=r"already contains a run \(metrics\.jsonl\).*\[existing_run\]"
    ):
        run(dataset, model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_is_not_written_into_a_dataset(dataset, model):
    with pytest.raises(
        RolloutError, match=r".* already contains a dataset \(1 shard\).*\[out_is_free\]"
    ):
        run(dataset, model, Path(dataset))


def test_checkpoint_carries_the_tokenizer_and_replaces_a_half_written_one(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    save_tiny_model(source)
    (source / "tokenizer.json").write_text("{}")
    half = out / "checkpoints" / ".global_step_3.partial"
    half.mkdir(parents=True)
    (half / "junk").touch()
    loaded = AutoModelForCausalLM.from_pretrained(source)
    path = save_checkpoint(loaded, source, out, 3)
    assert path.name == "global_step_3"
    assert sorted(p.name for p in path.parent.iterdir()) == ["global_step_3", "latest"]
    assert (path / "tokenizer.json").read_text() == "{}"
    assert not (path / "junk").exists()
    assert torch.equal(weights(str(path)), weights(str(source)))


def test_verb_prints_the_result_as_json_on_stdout(dataset, model, tmp_path):
    out = str(tmp_path / "run")
    args = [dataset, "--model", model, "--out", out, "--set", "batch.max_updates=1", "--json"]
    done = CliRunner().invoke(train_verb, args, catch_exceptions=False)
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert printed["num_updates"] == 1
    assert printed["checkpoint"] == f"{out}/checkpoints/global_step_1"


def test_verb_help_ends_with_an_example_on_a_line_of_its_own():
    lines = CliRunner().invoke(train_verb, ["--help"]).output.splitlines()
    assert lines[-2] == "  Example:"
    assert lines[-1].startswith("    rollouts train shop/ --model ")
    assert not any("\\b" in line or "\b" in line for line in lines)


def test_verb_reports_to_people(dataset, model, tmp_path):
    out = str(tmp_path / "run")
    config = tmp_path / "c.toml"
    config.write_text("[batch]\nmax_updates = 1\ngroups_per_batch = 2\ngroups_per_mini_batch = 2\n")
    args = [dataset, "--model", model, "--out", out, "--config", str(config)]
    done = CliRunner().invoke(train_verb, args, catch_exceptions=False)
    checkpoint = f"{out}/checkpoints/global_step_1"
    assert f"checkpoint   {checkpoint}\n" in done.stdout
    assert done.stderr.splitlines()[-3:] == [
        f"next: rollouts view {out}",
        f"next: rollouts plot {out}",
        f"next: transformers.AutoModelForCausalLM.from_pretrained('{checkpoint}')",
    ]
    assert json.loads(Path(out, "config.json").read_text())["batch"]["groups_per_batch"] == 2


def test_the_verb_suggests_an_audit_of_rows_with_log_probabilities(model, tmp_path):
    rows = group_rows(3, REWARDS)
    for row in rows:
        row["rollout_logprobs"] = [-3.0] * len(row["response_ids"])
    dataset = write_dataset(tmp_path / "ds", rows)
    args = [dataset, "--model", model, "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(train_verb, args, catch_exceptions=False)
    audit = f"next: rollouts audit {dataset} --weights {model}"
    assert done.stderr.splitlines()[-1] == audit


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({}, "1 of 3 trained, 2 without variance"),
        ({"drop_zero_variance_groups": True}, "1 of 1 trained, 2 without variance left out"),
        ({"policy_loss_type": "cross_entropy"}, "3 of 3 trained"),
    ],
)
def test_report_counts_the_groups_that_made_a_gradient(settings, reported, model, tmp_path):
    rows = group_rows(3, REWARDS)
    for row in rows:
        if row["is_last_step"] and row["instance_id"] != "g1":
            row["reward"] = 1.0
    dataset = write_dataset(tmp_path / "ds", rows)
    args = [dataset, "--model", model, "--out", str(tmp_path / "run")]
    overrides = [
        text
        for k, v in settings.items()
        for text in ("--set", f"{'.'.join(PLACES[k])}={str(v).lower()}")
    ]
    done = CliRunner().invoke(train_verb, [*args, *overrides], catch_exceptions=False)
    assert f"groups       {reported}\n" in done.stdout


def test_groups_not_reached_are_not_counted_as_trained(dataset, model, tmp_path):
    settings = {"groups_per_batch": 1, "groups_per_mini_batch": 1, "epochs_per_batch": 2}
    result = run(dataset, model, tmp_path, max_updates=3, **settings)
    assert (result.num_trained_groups, result.num_groups) == (2, 3)
