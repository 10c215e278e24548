"""Whole runs with every loss, reduction and correction, and what is refused."""

import math

import polars as pl
import pytest
from accelerate.state import AcceleratorState

import trainer
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.losses_helpers import EVERYTHING, ON_SAMPLER, named, some_trajectories
from tests.helpers.trainer_helpers import metrics_of, save_tiny_model, write_dataset
from trainer.batches.plan import Plan
from trainer.run.warnings import warnings_before


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    rows = some_trajectories(rollout_logprobs=[-4.0, -3.0, -5.0, -4.5])
    path = tmp_path_factory.mktemp("data") / "ds"
    return write_dataset(path, rows, logprobs_mode="processed")


def run(dataset, model, out, **settings):
    defaults = {
        "groups_per_mini_batch": 1,
        "epochs_per_batch": 2,
        "learning_rate": 1e-3,
        "partial_groups": "train",
    }
    config = train_config(dataset=dataset, model=model, out=str(out), **defaults | settings)
    trainer.train(config)
    return metrics_of(out)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=named(settings), marks=[pytest.mark.slow] * (number % 4 > 0))
        for number, settings in enumerate(EVERYTHING)
    ],
)
def test_every_loss_reduction_and_correction_runs_end_to_end(settings, dataset, model, tmp_path):
    lines = run(dataset, model, tmp_path / "run", **settings)
    assert len(lines) == 4
    assert [line["skipped"] for line in lines] == [0] * 4
    assert all(math.isfinite(v) for line in lines for v in line.values() if v is not None)
    assert all(line["grad_norm"] is not None for line in lines)


def test_supervised_training_needs_no_reward_and_makes_every_group_likelier(model, tmp_path):
    rows = [row | {"reward": None} for row in some_trajectories()]
    dataset = write_dataset(tmp_path / "ds", rows)
    settings = {
        "policy_loss_type": "cross_entropy",
        "groups_per_mini_batch": 2,
        "groups_per_batch": 2,
    }
    lines = run(dataset, model, tmp_path / "run", num_epochs=3, **settings)
    losses = [line["loss"] for line in lines]
    assert losses[-1] < losses[0]
    assert lines[0]["num_trained_groups"] == 2
    with pytest.raises(RolloutError, match="unknown_outcome"):
        run(dataset, model, tmp_path / "rl")


@pytest.mark.slow
def test_reference_model_is_another_models_directory(dataset, model, tmp_path):
    other = save_tiny_model(tmp_path / "other", seed=5)
    own = run(dataset, model, tmp_path / "own", kl_loss_coef=0.1)
    far = run(dataset, model, tmp_path / "far", kl_loss_coef=0.1, reference_model=other)
    assert own[0]["policy_kl"] == pytest.approx(0, abs=1e-6)
    assert own[-1]["policy_kl"] > 0
    assert far[0]["policy_kl"] > 0.5


def test_reference_has_the_numerics_of_the_policy(dataset, model, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        first = run(dataset, model, tmp_path, kl_loss_coef=0.1, dtype="bfloat16", max_updates=1)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert first[0]["policy_kl"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy_loss_type": "rollout_is"} | ON_SAMPLER, "rollout_is"),
        ({"policy_loss_type": "dppo"} | ON_SAMPLER, "dppo"),
        ({"policy_loss_type": "cispo", "cispo_anchor": "rollout"} | ON_SAMPLER, "cispo"),
        ({"sequence_mask_metric": "product"}, "a mask based on importance ratios"),
        ({"tis_ratio_type": "sequence"}, "tis_ratio_type sequence"),
        ({"tis_ratio_type": "token"}, "tis_ratio_type token"),
    ],
)
def test_what_needs_the_samplers_log_probabilities_is_refused_without_them(
    settings, named, model, tmp_path
):
    dataset = write_dataset(tmp_path / "ds", some_trajectories())
    with pytest.raises(
        RolloutError,
        match=rf"no row has rollout_logprobs, which .*{named}.* needs.*\[rollout_logprobs\]",
    ):
        run(dataset, model, tmp_path / "run", **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"policy_loss_type": "cispo", "cispo_anchor": "rollout"} | {"tis_ratio_type": "token"},
            "expected auto or none for tis_ratio_type",
        ),
        (
            {"policy_loss_type": "dppo", "tis_ratio_type": "sequence"},
            "expected auto or none for tis_ratio_type",
        ),
        (
            {"policy_loss_type": "cross_entropy", "sequence_mask_metric": "product"},
            "found cross_entropy; expected a loss with importance ratios",
        ),
        ({"reduction": "seq_mean_token_sum_norm"}, "max_seq_len: found none"),
        ({"token_mask_is_threshold_low": 0.5}, "both or neither"),
        ({"geo_mask_low": 1.2}, "loss.geo_mask_low and loss.geo_mask_high: found 1.2 and 1.01"),
        ({"reference_model": "m"}, "expected none, because kl_loss_coef and kl_reward_coef are 0"),
        ({"kl_loss_coef": 0.1, "kl_reward_coef": 0.1}, "at most one above 0"),
        ({"policy_loss_type": "cross_entropy", "kl_reward_coef": 0.1}, "uses no rewards"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c: found 1.0"),
        ({"kl_loss_coef": -1.0}, "kl_loss_coef: found -1.0"),
        ({"kl_cov_frac": 1.5}, r"kl_cov_frac: found 1.5; expected a number in \[0, 1\]"),
    ],
)
def test_contradictions_are_refused(settings, named):
    with pytest.raises(RolloutError, match=named):
        train_config(dataset="d", model="m", out="o", **settings)


@pytest.mark.parametrize("name", ["gspo", "sapo"])
def test_losses_meant_for_another_reduction_say_so(name):
    columns = {"instance_id": pl.String, "trajectory_id": pl.String}
    columns |= {"trains": pl.Boolean, "num_forwarded_tokens": pl.Int64}
    rows = pl.DataFrame(schema=columns)
    config = {"dataset": "d", "model": "m", "out": "o", "policy_loss_type": name}
    plan = Plan(trajectories=rows, batches=(), num_groups_without_variance=0)
    [warning] = warnings_before(rows, plan, train_config(**config)).values()
    assert f"{name} is designed for loss.reduction sequence_mean" in warning
    other = train_config(**config, reduction="trajectory_mean")
    assert not warnings_before(rows, plan, other)


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, True),
        ({"tis_ratio_type": None}, True),
        ({"policy_loss_type": "cross_entropy"}, False),
        ({"policy_loss_type": "dppo"} | ON_SAMPLER, False),
        ({"policy_loss_type": "dppo", "sequence_mask_metric": "product"} | ON_SAMPLER, True),
        ({"policy_loss_type": "cispo"} | ON_SAMPLER, True),
        ({"policy_loss_type": "cispo", "cispo_anchor": "rollout"} | ON_SAMPLER, False),
    ],
)
def test_the_pass_for_old_log_probabilities_is_made_where_they_enter(settings, *, needs):
    assert (
        train_config(dataset="d", model="m", out="o", **settings).loss.needs_old_logprobs is needs
    )
