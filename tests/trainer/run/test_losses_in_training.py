"""Every loss, reduction and correction inside an update: gradients, cuts, layouts, whole runs."""

import math

import numpy as np
import pytest
import torch

import pipelines
import rollout_io
from tests.helpers.configs import train_config
from tests.helpers.losses_helpers import (
    CORRECTIONS,
    EVERYTHING,
    ON_SAMPLER,
    named,
    policy_loss,
    some_trajectories,
)
from tests.helpers.trainer_helpers import (
    VOCAB,
    Row,
    forests_of,
    gradient_of_update,
    gradients,
    load_batch,
    make_batch,
    plain_logprobs,
    relative_difference,
    run_of,
    tiny_policy,
    update_with,
    write_dataset,
)
from trainer.algorithms.correction import correct
from trainer.algorithms.kl import kl_estimates
from trainer.algorithms.losses import Targets, covariances, kl_cov_selection
from trainer.batches.plan import make_plan
from trainer.config.functions import POLICY_LOSS, bind
from trainer.config.sections import BatchConfig
from trainer.loss import policy_logprobs
from trainer.run.warnings import warnings_about_rows


class Case:
    """Six rows of three trajectories and two groups, log-probabilities near the policy's own."""

    def __init__(self, **settings):
        rng = np.random.default_rng(1)
        lengths = (5, 3, 6, 1, 4, 2)
        self.rows: list[Row] = [
            (rng.integers(0, VOCAB, 6).tolist(), rng.integers(0, VOCAB, n).tolist(), [True] * n)
            for n in lengths
        ]
        self.rows[2][2][3] = self.rows[4][2][0] = False
        self.settings = settings
        self.config = train_config(dataset="d", model="m", out="o", **settings)
        self.policy, self.reference = self.new_policy(), tiny_policy(seed=1)
        self.temperatures = rng.uniform(0.7, 1.5, 6).tolist()
        own = plain_logprobs(self.policy.model, self.rows, self.temperatures).detach()
        generator = torch.Generator().manual_seed(0)
        self.old = own + 0.2 * torch.randn(own.shape, generator=generator)
        rollout = self.old + 0.2 * torch.randn(own.shape, generator=generator)
        self.advantages = rng.normal(size=6).tolist()
        self.trajectories = [("a", "a_0")] * 2 + [("a", "a_1")] * 3 + [("b", "b_0")]
        self.batch = make_batch(
            self.rows,
            advantages=self.advantages,
            temperatures=self.temperatures,
            rollout_logprobs=[part.tolist() for part in rollout.split(list(lengths))],
            trajectories=self.trajectories,
        )

    def new_policy(self, chunk=1024):
        policy = tiny_policy(chunk=chunk)
        policy.entropy_gradient = self.config.loss.entropy_loss_coef > 0
        return policy

    def gradient(self, budget=4096, **changes):
        settings = {"old": self.old, "corrects": self.config.loss.corrects_for_sampler}
        settings |= self.settings | changes
        if settings.get("kl_loss_coef"):
            settings["ref"] = policy_logprobs(
                run_of(self.reference), self.batch, forests_of(self.batch)
            )
        torch.manual_seed(0)
        return gradient_of_update(self.new_policy(), self.batch, budget=budget, **settings)

    def literal_loss(self):
        """Full logits of one row at a time, weights by counting, terms as documented."""
        c = self.config.loss
        logprobs, entropy = self.plain(self.policy)
        keep = torch.from_numpy(self.batch.trains)
        row = torch.repeat_interleave(torch.arange(6), torch.tensor([len(r[1]) for r in self.rows]))
        x = Targets(
            logprobs=logprobs[keep],
            old_logprobs=self.old[keep],
            rollout_logprobs=self.batch.rollout_logprobs[keep],
            advantages=self.batch.advantages[keep],
            row=row[keep],
            selected=torch.zeros(int(keep.sum()), dtype=torch.bool),
        )
        if c.policy_loss_type == "kl_cov":
            covariance = covariances(x.advantages, x.logprobs.detach())
            x.selected[kl_cov_selection(covariance, fraction=c.kl_cov_frac)] = True
        losses = policy_loss(x, bind(POLICY_LOSS, c)).losses
        if c.corrects_for_sampler:
            losses = losses * correct(x.old_logprobs, x.rollout_logprobs, x.row, c).weights
        if c.kl_loss_coef:
            reference = self.plain(self.reference)[0].detach()[keep]
            losses = losses + c.kl_loss_coef * kl_estimates(
                x.logprobs, reference, c.kl_estimator_type
            )
        losses = losses - c.entropy_loss_coef * entropy[keep]
        return self.reduced(losses, x.row)

    def reduced(self, losses, row):
        unit = {
            "token_mean": [0] * 6,
            "prompt_mean": [0, 0, 0, 0, 0, 1],
            "trajectory_mean": [0, 0, 1, 1, 1, 2],
        }.get(self.config.loss.reduction, list(range(6)))
        of = torch.tensor(unit)[row]
        if self.config.loss.reduction == "seq_mean_token_sum_norm":
            return losses.sum() / (6 * 8)
        return torch.stack([losses[of == u].mean() for u in sorted(set(unit))]).mean()

    def plain(self, policy):
        logprobs = plain_logprobs(policy.model, self.rows, self.temperatures)
        entropies = []
        for (prompt, response, _), temperature in zip(self.rows, self.temperatures, strict=True):
            logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0].float()
            log_p = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        return logprobs, torch.cat(entropies)


@pytest.mark.parametrize(
    "settings", [s for s in EVERYTHING if s.get("policy_loss_type") != "clip_cov"], ids=named
)
def test_gradient_is_that_of_the_literal_objective(settings):
    case = Case(**settings)
    case.literal_loss().backward()
    assert relative_difference(case.gradient(budget=20), gradients(case.policy)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("settings", EVERYTHING, ids=named)
def test_micro_batches_change_nothing(settings):
    case = Case(**settings)
    whole = case.gradient()
    assert float(whole.norm()) > 0
    assert relative_difference(case.gradient(budget=12), whole) < 1e-4


@pytest.mark.parametrize(
    ("reduction", "num"),
    [
        ("sequence_mean", 6),
        ("seq_mean_token_sum_norm", 6),
        ("trajectory_mean", 3),
        ("prompt_mean", 2),
    ],
)
def test_what_trains_nothing_counts_in_the_mean_over_rows_trajectories_and_groups(reduction, num):
    lengths = {"max_seq_len": 8} if reduction == "seq_mean_token_sum_norm" else {}
    case = Case(reduction=reduction, tis_ratio_type=None, **lengths)
    alone = case.gradient()
    masked = ([1, 2], [3, 4], [False, False])
    more = make_batch(
        [*case.rows, masked],
        advantages=[*case.advantages, 0.0],
        temperatures=[*case.temperatures, 1.0],
        trajectories=[*case.trajectories, ("c", "c_0")],
    )
    case.batch, case.old = more, torch.cat([case.old, torch.zeros(2)])
    assert relative_difference(case.gradient(), alone * num / (num + 1)) < 1e-5


@pytest.mark.parametrize("budget", [12, 20, 4096])
def test_token_mean_legacy_is_the_mean_over_micro_batches_of_their_means(budget):
    case = Case(reduction="token_mean_legacy", tis_ratio_type=None)
    exact = case.new_policy()
    exact.model.double()
    now = plain_logprobs(exact.model, case.rows, case.temperatures)
    ratio, advantages = (now - case.old.double()).exp(), case.batch.advantages.double()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    forests = forests_of(case.batch, budget)
    torch.stack([losses[forest.target_slot].mean() for forest in forests]).mean().backward()
    assert relative_difference(case.gradient(budget), gradients(exact).float()) < 1e-5
    by_token = Case(reduction="token_mean", tis_ratio_type=None).gradient(budget)
    difference = relative_difference(case.gradient(budget), by_token)
    assert difference > 1e-2 if len(forests) > 1 else difference == 0


def test_clip_cov_leaves_out_tokens_however_many_there_are():
    case = Case(policy_loss_type="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.1)
    learner = run_of(case.policy, **case.settings)
    metrics = update_with(learner, case.batch, forests_of(case.batch, 12), case.old)
    assert 0.05 < metrics["clip_ratio"] < 0.8


def batch_of(rows, path, layout):
    config = train_config(dataset="d", model="m", out="o", partial_groups="train")
    dataset = rollout_io.scan(write_dataset(path / layout, rows))
    plan = make_plan(pipelines.trajectory_returns(dataset, "last").collect(), config)
    return load_batch(dataset, plan, plan.batches[0], BatchConfig(sequence_layout=layout))


def gradients_of_layouts(path, **settings):
    rows = some_trajectories(rollout_logprobs=[-4.0, -3.0, -5.0, -4.5])
    torch.manual_seed(0)
    step_rows, merged = (
        gradient_of_update(tiny_policy(), batch_of(rows, path, layout), corrects=True, **settings)
        for layout in ("step", "merge")
    )
    return step_rows, merged


INVARIANT = [
    *({"policy_loss_type": name} for name in ("regular", "cispo", "sapo", "kl_cov")),
    {"reduction": "prompt_mean"},
    {"reduction": "trajectory_mean"},
    {"token_mask_is_threshold_low": 0.1, "token_mask_is_threshold_high": 5.0},
    {"policy_loss_type": "dppo", "reduction": "trajectory_mean"} | ON_SAMPLER,
]
BY_ROW = [
    {"reduction": "sequence_mean"},
    {"reduction": "seq_mean_token_sum_norm", "max_seq_len": 8},
    {"tis_ratio_type": "sequence"},
    {"sequence_mask_metric": "geometric", "geo_mask_low": 0.5, "geo_mask_high": 1.5},
    {"outlier_token_is_threshold_high": 3.0},
]


@pytest.mark.parametrize("settings", INVARIANT, ids=named)
def test_merging_changes_no_gradient_of_what_is_by_token_trajectory_or_group(settings, tmp_path):
    step_rows, merged = gradients_of_layouts(tmp_path, **settings)
    assert relative_difference(step_rows, merged) < 1e-4


@pytest.mark.parametrize("settings", BY_ROW, ids=named)
def test_merging_changes_the_gradient_of_what_is_by_row_and_is_warned_about(settings, tmp_path):
    step_rows, merged = gradients_of_layouts(tmp_path, **settings)
    assert relative_difference(step_rows, merged) > 1e-2
    config = train_config(dataset="d", model="m", out="o", sequence_layout="step", **settings)
    warning = warnings_about_rows(10, 5, config)["rows"]
    assert warning.startswith("trajectories (5) are split into rows (10)")
    assert "Hint: pass --set batch.sequence_layout=merge" in warning
    assert not warnings_about_rows(5, 5, config)


def test_reference_that_is_the_policy_has_no_divergence_and_no_gradient():
    case = Case(kl_loss_coef=0.5)
    forests = forests_of(case.batch)
    own = policy_logprobs(run_of(case.policy), case.batch, forests)
    learner = run_of(case.policy, kl_loss_coef=0.5)
    metrics = update_with(learner, case.batch, forests, None, own)
    assert metrics["policy_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"], abs=1e-6)
    shifted = update_with(learner, case.batch, forests, None, own - 0.5)
    assert shifted["policy_kl"] == pytest.approx(math.exp(-0.5) + 0.5 - 1, rel=1e-4)
    assert shifted["loss"] == pytest.approx(shifted["policy_loss"] + 0.5 * shifted["policy_kl"])


def test_entropy_bonus_alone_raises_the_entropy():
    case = Case(entropy_loss_coef=1.0)
    case.batch.advantages.zero_()
    learner = run_of(case.policy, learning_rate=0.1, **case.settings)
    case.policy.entropy_gradient = True
    entropy = [
        update_with(learner, case.batch, forests_of(case.batch), None)["policy_entropy"]
        for _ in range(4)
    ]
    assert entropy == sorted(entropy)
    assert entropy[-1] > entropy[0] + 1e-3


def test_correction_metrics_do_not_depend_on_micro_batches():
    settings = CORRECTIONS[2] | CORRECTIONS[4] | CORRECTIONS[5] | {"tis_ratio_type": "sequence"}
    case = Case(**settings)
    found = []
    for budget in (12, 4096):
        learner = run_of(case.new_policy(), corrects=True, **settings)
        found.append(update_with(learner, case.batch, forests_of(case.batch, budget), case.old))
    assert found[0].pop("num_micro_batches") > found[1].pop("num_micro_batches")
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    trained = torch.from_numpy(case.batch.trains)
    ratios = (case.old - case.batch.rollout_logprobs)[trained].exp().double()
    expected = {
        "mean": ratios.mean(),
        "std": ratios.std(),
        "max": ratios.max(),
        "min": ratios.min(),
    }
    for name, value in expected.items():
        assert found[0][f"is_ratio_{name}"] == pytest.approx(float(value))
