"""Every estimator from a dataset on disk to a checkpoint, on a tiny random Llama."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import pipelines
import rollout_io
import trainer
from rollout_io.cli.main import run as main
from rollout_io.dataset.versions import REWARDS, digests, version_path, write_version
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    group_rows,
    metrics_of,
    save_tiny_model,
    step,
    tiny_llama,
    two_step_trajectory,
    write_dataset,
)
from trainer.batches.plan import dataset_returns, make_plan
from trainer.config.train_config import resolved
from trainer.models.critic import Critic, load_critic
from trainer.run.dataset_checks import scan_rows

ESTIMATORS = ["grpo", "rloo", "maxrl", "gdpo", "reinforce++", "gae"]
SEPARATE = {"estimator": "gdpo", "reward_weights": {"correct": 1.0, "format/length": 0.5}}


@pytest.fixture(scope="module")
def critic_model(tmp_path_factory):
    """A critic whose values vary."""
    path = tmp_path_factory.mktemp("critic")
    critic = Critic(tiny_llama(seed=3))
    torch.nn.init.normal_(critic.value_head.weight, std=0.2)
    critic.save(path)
    return str(path)


def rewarded_rows(num_groups=3, **values):
    """Groups of four trajectories of two steps, of which the first earns too."""
    rows = group_rows(num_groups, (1.0, 0.0, 0.0, 1.0), **values)
    for first, last in zip(rows[::2], rows[1::2], strict=True):
        first["reward"] = 0.25 * first["repetition_id"]
        scores = {"correct": first["repetition_id"] // 2, "format/length": 1e-3 * last["reward"]}
        # Metrics of the last step count; of a metric that it lacks, those of the step before.
        first["metrics"] = entries({"correct": 9.0, "format/length": scores["format/length"]})
        last["metrics"] = entries({"correct": scores["correct"], "turns": 2.0})
    return rows


def entries(values):
    return [{"key": key, "value": value} for key, value in values.items()]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "ds", rewarded_rows())


def run(dataset, model, out, **settings):
    defaults = {"tokens_per_micro_batch": 64, "weight_decay": 0.0, "learning_rate": 1e-3}
    defaults |= SEPARATE if settings.get("estimator") == "gdpo" else {}
    config = train_config(dataset=dataset, model=model, out=str(out), **(defaults | settings))
    return trainer.train(config)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_layout_and_micro_batches_change_no_estimator(
    estimator, dataset, model, critic_model, tmp_path
):
    settings = {"estimator": estimator, "gamma": 0.9, "gae_lambda": 0.8}
    if estimator == "gae":
        settings["critic_model"] = critic_model
    found = [
        run(dataset, model, tmp_path / layout, sequence_layout=layout, **settings, **cut).metrics
        for layout, cut in (
            ("step", {"tokens_per_micro_batch": 20}),
            ("merge", {"tokens_per_micro_batch": 300}),
        )
    ]
    assert found[0]["num_micro_batches"] > found[1]["num_micro_batches"]
    same = found[0].keys() - {
        *("num_forwarded_tokens", "num_micro_batches", "num_rows", "seconds", "tokens_per_s"),
        *("generate/batch_num_seq", "generate/num_seq_after_merge"),
    }
    for name in same:
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3, abs=1e-5), name


def test_gdpo_takes_metrics_of_steps_and_of_merged_rows_alike(dataset, model, tmp_path):
    merged = pipelines.merge(rollout_io.scan(dataset)).collect().to_arrow()
    assert merged.num_rows < rollout_io.read(dataset).num_rows
    with rollout_io.RolloutWriter(tmp_path / "merged") as writer:
        writer.write(merged)
    correct, form = np.array([0.0, 0.0, 1.0, 1.0]), np.array([1.0, 0.0, 0.0, 1.0]) * 1e-3
    parts = [(r - r.mean()) / (r.std(ddof=1) + 1e-6) * w for r, w in ((correct, 1.0), (form, 0.5))]
    for path in (dataset, str(tmp_path / "merged")):
        config = resolved(train_config(dataset=path, model=model, out="o", **SEPARATE))
        assert config.advantage.batch_normalize
        plan = make_plan(dataset_returns(scan_rows(config), config), config)
        found = plan.trajectories.filter(instance_id="g1")["advantage"].to_list()
        assert found == pytest.approx(sum(parts).tolist(), rel=1e-6)


@pytest.mark.slow
def test_gdpo_trains_on_reward_versions_as_on_metrics(dataset, model, tmp_path):
    rows = rollout_io.scan(dataset)
    own = tmp_path / "ds"
    with rollout_io.RolloutWriter(own) as writer:
        writer.write(rows.drop("metrics").collect().to_arrow())
    scores = digests(rollout_io.scan(own)).sort("trajectory_id")
    repetition = scores["trajectory_id"].str.slice(-1).cast(pl.Int64)
    values = {"correct": repetition // 2, "form": 1e-3 * repetition.is_in([0, 3])}
    for name, value in values.items():
        table = scores.with_columns(reward=value.cast(pl.Float64), error=pl.lit(None, pl.String))
        write_version(version_path(str(own), name), table.select(*REWARDS.schema), {})
    weights = {"correct": 1.0, "form": 0.5}
    found = [
        run(dataset, model, tmp_path / "a", estimator="gdpo"),
        run(str(own), model, tmp_path / "b", estimator="gdpo", reward_weights=weights),
    ]
    for name in ("loss", "grad_norm", "loss/avg_raw_advantages_abs"):
        assert found[0].metrics[name] == pytest.approx(found[1].metrics[name], rel=1e-9)


@pytest.mark.slow
def test_the_command_of_the_page_for_several_rewards_trains(dataset, model, tmp_path, monkeypatch):
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    (command,) = re.findall(
        r"\n    rollouts (train [^`]*?--algorithm gdpo.*?)\n\n", page, re.DOTALL
    )
    paths = {"DS": dataset, "DIR": model, "RUN": "run"}
    words = [paths.get(word, word) for word in command.replace("\\\n", "").split()]
    monkeypatch.chdir(tmp_path)
    assert main([word.replace(".format=", '."format/length"=') for word in words]) == 0
    assert metrics_of(tmp_path / "run")[0]["grad_norm"] > 0


def test_gdpo_keeps_groups_that_differ_in_one_reward_alone_and_refuses_unknown_ones(
    model, tmp_path
):
    rows = rewarded_rows(2)
    for row in rows:
        row["reward"] = 1.0
        if row["instance_id"] == "g1":
            row["metrics"] = entries({"correct": 1.0, "format/length": 0.0})
    dataset = write_dataset(tmp_path / "ds", rows)
    dropping = {"drop_zero_variance_groups": True, "max_updates": 1}
    result = run(dataset, model, tmp_path / "run", estimator="gdpo", **dropping)
    assert result.num_trained_groups == 1
    unknown = {"correct": 1.0, "speed": 1.0}
    with pytest.raises(RolloutError, match=r"its reward speed is unknown.*\[unknown_outcome\]"):
        run(dataset, model, tmp_path / "no", estimator="gdpo", reward_weights=unknown)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "gdpo"}, "reward_weights and advantage.estimator"),
        ({"reward_weights": {"a": 1.0}}, "reward_weights and advantage.estimator"),
        ({"estimator": "gdpo", "reward_weights": {"a": math.nan}}, "reward_weights"),
        ({**SEPARATE, "kl_reward_coef": 0.1}, "kl_reward_coef and advantage.estimator"),
    ],
)
def test_separate_rewards_are_named_for_gdpo_alone(settings, message):
    with pytest.raises(RolloutError, match=message):
        train_config(dataset="d", model="m", out="o", **settings)


@pytest.mark.slow
def test_a_changed_separate_reward_is_another_dataset_for_resume(model, tmp_path):
    rows = rewarded_rows(2)
    dataset = write_dataset(tmp_path / "ds", rows)
    settings = {"estimator": "gdpo", "groups_per_batch": 1, "groups_per_mini_batch": 1}
    run(dataset, model, tmp_path / "run", max_updates=1, **settings)
    rows[1]["metrics"][0]["value"] = 5.0
    shutil.rmtree(dataset)
    write_dataset(tmp_path / "ds", rows)
    config = train_config(
        dataset=dataset, model=model, out=str(tmp_path / "run"), max_updates=2,
        tokens_per_micro_batch=64, weight_decay=0.0, learning_rate=1e-3, **(settings | SEPARATE)
    )  # fmt: skip
    with pytest.raises(RolloutError, match="resume_dataset"):
        trainer.train(config, resume=True)


@pytest.mark.slow
def test_value_loss_falls_over_a_run(dataset, model, tmp_path):
    settings = {"critic_learning_rate": 1e-2, "value_clip": None, "num_epochs": 12}
    run(dataset, model, tmp_path, estimator="gae", **settings)
    losses = [line["critic/critic_loss"] for line in metrics_of(tmp_path)]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.slow
def test_checkpoint_holds_the_critic_and_a_run_goes_on_from_it(dataset, model, tmp_path):
    settings = {"estimator": "gae", "critic_learning_rate": 1e-2}
    first = run(dataset, model, tmp_path / "a", **settings)
    critic = str(Path(first.checkpoint) / "critic")
    assert load_critic(critic).value_head.weight.any()
    again = run(dataset, first.checkpoint, tmp_path / "b", critic_model=critic, **settings)
    assert first.metrics["critic/values_mean"] == 0.0
    assert again.metrics["critic/values_mean"] != 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "reinforce++"},
        {"estimator": "gae"},
        {"estimator": "maxrl", "batch_normalize": True},
    ],
)
def test_whitening_is_over_the_batch_not_the_mini_batch(settings, model, tmp_path):
    rows = rewarded_rows(2)
    for row in rows[8:]:
        row["reward"] += 3.0
    dataset = write_dataset(tmp_path / "ds", rows)
    run(dataset, model, tmp_path / "run", groups_per_batch=2, groups_per_mini_batch=1, **settings)
    first, second = metrics_of(tmp_path / "run")
    losses = [line["loss"] for line in (first, second)]
    if "batch_normalize" in settings:
        assert abs(first["loss"]) < abs(first["loss/avg_raw_advantages_abs"])
    else:
        assert losses[0] > 0.5
    assert first["loss/avg_raw_advantages"] == pytest.approx(0, abs=1e-6)


def test_metrics_with_names_of_skyrl_are_of_the_batch(model, tmp_path):
    rewards = {"a": (1.0, 0.0), "b": (0.0, -3.0)}
    rows = [
        step(group, i, 0, [1], [2, 3], reward=reward, is_last_step=True)
        for group, values in rewards.items()
        for i, reward in enumerate(values)
    ]
    dataset = write_dataset(tmp_path / "ds", rows)
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 1, "normalize_by_std": False}
    run(dataset, model, tmp_path / "run", **settings)
    lines = metrics_of(tmp_path / "run")
    expected = {
        "reward/avg_raw_reward": -0.5,
        "reward/mean_positive_reward": 0.25,
        "reward/avg_pass_at_n": 0.5,
        "loss/avg_final_rewards": -0.5,
        "loss/avg_raw_advantages": 0.0,
        "loss/avg_raw_advantages_abs": 1.0,
    }
    assert len(lines) == 2
    for line in lines:
        assert {name: line[name] for name in expected} == pytest.approx(expected)
    assert sorted(line["return_mean"] for line in lines) == [-1.5, 0.5]


@pytest.mark.parametrize("estimator", ["gae", "reinforce++"])
def test_steps_of_unknown_reward_are_refused_by_what_adds_them_up(estimator, model, tmp_path):
    rows = rewarded_rows(1)
    rows[2]["reward"] = None
    dataset = write_dataset(tmp_path / "ds", rows)
    with pytest.raises(RolloutError, match=r"trajectory 'g0_1', row 0"):
        run(dataset, model, tmp_path / "run", estimator=estimator)
    assert run(dataset, model, tmp_path / "run").num_updates == 1


def test_rewards_per_token_stand_in_for_the_scalar(model, tmp_path):
    scalar = rewarded_rows(2)
    spread = [row | {"rewards": [0.0, 0.0, 0.0, row["reward"]]} for row in rewarded_rows(2)]
    found = [
        run(
            write_dataset(tmp_path / f"ds{i}", rows), model, tmp_path / f"run{i}",
            estimator="reinforce++", gamma=0.5,
        ).metrics
        for i, rows in enumerate((scalar, spread))
    ]  # fmt: skip
    for name in ("loss", "grad_norm", "loss/avg_raw_advantages_abs"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_a_lone_survivor_trains_nothing_and_is_warned_about(estimator, model, tmp_path, capsys):
    rng = np.random.default_rng(1)
    survivor = two_step_trajectory(rng, "alone", 0, 1.0)
    lost = two_step_trajectory(rng, "alone", 1, 0.0)
    failed = [row | {"reward": None, "error": "lost"} for row in lost]
    dataset = write_dataset(tmp_path / "ds", [*rewarded_rows(1), *survivor, *failed])
    settings = {"estimator": estimator, "partial_groups": "train"}
    result = run(dataset, model, tmp_path / "run", failed="trajectory", **settings)
    said = "warning: only one trajectory is trained on in 1 of 2 groups"
    assert said in capsys.readouterr().err
    assert result.num_trained_groups == 1
    run(dataset, model, tmp_path / "whole", **settings)
    assert "only one trajectory" not in capsys.readouterr().err


def test_groups_of_one_alone_are_refused(model, tmp_path):
    rows = two_step_trajectory(np.random.default_rng(1), "alone", 0, 1.0)
    dataset = write_dataset(tmp_path / "ds", rows)
    with pytest.raises(
        RolloutError, match=r"every advantage is 0, .*\(1 group\)\. \[zero_advantages\]"
    ) as caught:
        run(dataset, model, tmp_path / "run")
    for way in (
        "convert --group-by",
        "--algorithm reinforce++ and gae need no groups",
        "loss.policy_loss_type=cross_entropy",
    ):
        assert way in (caught.value.hint or "")


@pytest.mark.slow
def test_groups_of_one_train_as_the_hint_says_and_too_few_updates_are_explained(
    model, tmp_path, capsys
):
    rng = np.random.default_rng(1)
    rows = [row for i in range(3) for row in two_step_trajectory(rng, f"s{i}", 0, float(i == 1))]
    dataset = write_dataset(tmp_path / "ds", rows)
    settings = {"estimator": "reinforce++", "max_updates": 2}
    result = run(dataset, model, tmp_path / "run", **settings)
    assert (result.num_updates, result.num_trained_groups) == (1, 3)
    assert metrics_of(tmp_path / "run")[0]["grad_norm"] > 0
    said = capsys.readouterr().err
    assert "note: 3 groups, 8 per update, give 1 update in 1 pass over the dataset, fewer" in said
    assert "max_updates (2): pass --set batch.num_epochs=N for more passes" in said
    assert run(dataset, model, tmp_path / "two", **settings, num_epochs=2).num_updates == 2
    assert "fewer than" not in capsys.readouterr().err


@pytest.mark.slow
def test_greedy_rows_are_masked_and_counted(model, tmp_path, capsys):
    rows = [row | {"temperature": 1.0} for row in rewarded_rows(2)]
    cold = [i for i, row in enumerate(rows) if row["step_index"] == 1 and i < len(rows) // 2]
    greedy = [row | ({"temperature": 0.0} if i in cold else {}) for i, row in enumerate(rows)]
    masked = [
        row | ({"loss_mask": [False] * len(row["loss_mask"])} if i in cold else {})
        for i, row in enumerate(rows)
    ]
    found = [
        run(
            write_dataset(tmp_path / f"ds{i}", some), model, tmp_path / f"run{i}", sequence_layout=s
        )
        for i, (some, s) in enumerate(
            [(greedy, "step"), (masked, "step"), (greedy, "merge"), (greedy, "tree")]
        )
    ]
    printed = capsys.readouterr().err
    assert (
        printed.count(
            f"warning: {len(cold)} rows sampled at temperature 0 will be excluded from training: "
        )
        == 3
    )
    assert [r.num_greedy_rows for r in found] == [len(cold), 0, len(cold), len(cold)]
    assert found[0].metrics["num_greedy_rows"] == len(cold)
    for other in found[1:]:
        for name in ("loss", "grad_norm", "num_trained_tokens"):
            assert other.metrics[name] == pytest.approx(found[0].metrics[name], rel=1e-4)
    whole = [row | {"temperature": 0.0} for row in rows]
    with pytest.raises(RolloutError, match="there are no tokens to train on") as error:
        run(write_dataset(tmp_path / "cold", whole), model, tmp_path / "cold_run")
    assert "temperature 0" in str(error.value.hint)


def test_row_too_long_for_the_critic_is_refused(dataset, model, tmp_path):
    small = Path(save_tiny_model(tmp_path / "small"))
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    settings = {"estimator": "gae", "critic_model": str(small)}
    with pytest.raises(RolloutError, match=r".* max_position_embeddings.*\[row_too_long\]"):
        run(dataset, model, tmp_path / "run", **settings)
