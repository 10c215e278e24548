"""Every loss, reduction and correction inside an update: gradients, cuts, layouts, whole runs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

import pipelines
import rollout_io
import trainer
from schemas.errors import RolloutError
from tests.trainer_helpers import (
    VOCAB,
    Row,
    forests_of,
    gradient_of_update,
    gradients,
    learner_of,
    make_batch,
    plain_logprobs,
    relative_difference,
    save_tiny_model,
    tiny_policy,
    two_step_trajectory,
    write_dataset,
)
from trainer.config import TrainConfig
from trainer.data import Batch, load_batch
from trainer.losses.correction import correct
from trainer.losses.covariance import covariances, kl_cov_selection
from trainer.losses.kl import kl_estimates
from trainer.metrics import warnings_about
from trainer.objective import Targets, policy_loss
from trainer.plan import make_plan
from trainer.policy import Policy
from trainer.update import policy_logprobs, update

ON_SAMPLER: dict[str, Any] = {"tis_ratio_type": None}
LOSSES: list[dict[str, Any]] = [
    {"policy_loss_type": "regular"},
    {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.1},
    {"policy_loss_type": "gspo"},
    {"policy_loss_type": "cispo", "cispo_eps_clip_low": 0.1, "cispo_eps_clip_high": 0.1},
    {"policy_loss_type": "cispo", "cispo_anchor": "rollout"} | ON_SAMPLER,
    {"policy_loss_type": "sapo"},
    {"policy_loss_type": "rollout_is"} | ON_SAMPLER,
    {"policy_loss_type": "dppo", "dppo_delta_low": 1e-3} | ON_SAMPLER,
    {"policy_loss_type": "dppo", "dppo_type": "binary_kl", "dppo_delta_high": 1e-3} | ON_SAMPLER,
    {"policy_loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.1},
    {"policy_loss_type": "kl_cov"},
    {"policy_loss_type": "importance_sampling"},
    {"policy_loss_type": "cross_entropy"},
]
REDUCTIONS: list[dict[str, Any]] = [
    {"loss_reduction": "token_mean"},
    {"loss_reduction": "sequence_mean"},
    {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 8},
    {"loss_reduction": "prompt_mean"},
    {"loss_reduction": "trajectory_mean"},
]
CORRECTIONS: list[dict[str, Any]] = [
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence"},
    {"sequence_mask_metric": "geometric", "geo_mask_low": 0.8, "geo_mask_high": 1.2},
    {"sequence_mask_metric": "product", "tis_ratio_type": None},
    {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 2.0},
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25},
]
TERMS: list[dict[str, Any]] = [
    {"kl_loss_coef": 0.1},
    {"kl_loss_coef": 0.1, "kl_estimator_type": "k2", "loss_reduction": "sequence_mean"},
    {"entropy_loss_coef": 0.1, "loss_reduction": "prompt_mean"},
]
EVERYTHING = [*LOSSES, *REDUCTIONS[1:], *CORRECTIONS[1:], *TERMS]


def named(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


class Case:
    """Six rows of three trajectories and two groups, log-probabilities near the policy's own."""

    def __init__(self, **settings: Any) -> None:
        rng = np.random.default_rng(1)
        lengths = (5, 3, 6, 1, 4, 2)
        self.rows: list[Row] = [
            (rng.integers(0, VOCAB, 6).tolist(), rng.integers(0, VOCAB, n).tolist(), [True] * n)
            for n in lengths
        ]
        self.rows[2][2][3] = self.rows[4][2][0] = False
        self.settings = settings
        self.config = TrainConfig(dataset="d", model="m", out="o", **settings)
        self.policy, self.reference = self.new_policy(), tiny_policy(seed=1)
        self.temperatures = rng.uniform(0.7, 1.5, 6).tolist()
        own = plain_logprobs(self.policy.model, self.rows, self.temperatures).detach()
        generator = torch.Generator().manual_seed(0)
        self.old = own + 0.2 * torch.randn(own.shape, generator=generator)
        rollout = self.old + 0.2 * torch.randn(own.shape, generator=generator)
        self.batch = make_batch(
            self.rows,
            advantages=rng.normal(size=6).tolist(),
            temperatures=self.temperatures,
            rollout_logprobs=[part.tolist() for part in rollout.split(list(lengths))],
            trajectories=[("a", "a_0")] * 2 + [("a", "a_1")] * 3 + [("b", "b_0")],
        )

    def new_policy(self, chunk: int = 1024) -> Policy:
        policy = tiny_policy(chunk=chunk)
        policy.entropy_gradient = self.config.entropy_loss_coef > 0
        return policy

    def gradient(self, budget: int = 4096, **changes: Any) -> Tensor:
        settings = {"old": self.old, "corrects": self.config.corrects_for_sampler}
        settings |= self.settings | changes
        if settings.get("kl_loss_coef"):
            settings["ref"] = policy_logprobs(
                learner_of(self.reference), self.batch, forests_of(self.batch)
            )
        torch.manual_seed(0)
        return gradient_of_update(self.new_policy(), self.batch, budget=budget, **settings)

    def literal_loss(self) -> Tensor:
        """Full logits of one row at a time, weights by counting, terms as documented."""
        c = self.config
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
        losses = policy_loss(x, c).losses
        if c.corrects_for_sampler:
            losses = losses * correct(x.old_logprobs, x.rollout_logprobs, x.row, c).weights
        if c.kl_loss_coef:
            reference = self.plain(self.reference)[0].detach()[keep]
            losses = losses + c.kl_loss_coef * kl_estimates(
                x.logprobs, reference, c.kl_estimator_type
            )
        losses = losses - c.entropy_loss_coef * entropy[keep]
        return self.reduced(losses, x.row)

    def reduced(self, losses: Tensor, row: Tensor) -> Tensor:
        unit = {
            "token_mean": [0] * 6,
            "prompt_mean": [0, 0, 0, 0, 0, 1],
            "trajectory_mean": [0, 0, 1, 1, 1, 2],
        }.get(self.config.loss_reduction, list(range(6)))
        of = torch.tensor(unit)[row]
        if self.config.loss_reduction == "seq_mean_token_sum_norm":
            return losses.sum() / (6 * 8)
        return torch.stack([losses[of == u].mean() for u in sorted(set(unit))]).mean()

    def plain(self, policy: Policy) -> tuple[Tensor, Tensor]:
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
def test_gradient_is_that_of_the_literal_objective(settings: dict[str, Any]) -> None:
    case = Case(**settings)
    case.literal_loss().backward()
    assert relative_difference(case.gradient(budget=20), gradients(case.policy)) < 1e-4


@pytest.mark.parametrize("settings", EVERYTHING, ids=named)
def test_micro_batches_change_nothing(settings: dict[str, Any]) -> None:
    case = Case(**settings)
    whole = case.gradient()
    assert float(whole.norm()) > 0
    assert relative_difference(case.gradient(budget=12), whole) < 1e-4


def test_clip_cov_leaves_out_tokens_however_many_there_are() -> None:
    case = Case(policy_loss_type="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.1)
    learner = learner_of(case.policy, **case.settings)
    metrics = update(learner, case.batch, forests_of(case.batch, 12), case.old)
    assert 0.05 < metrics["clip_ratio"] < 0.8


def batch_of(rows: list[dict[str, Any]], path: Path, layout: str) -> Batch:
    config = TrainConfig(dataset="d", model="m", out="o")
    dataset = rollout_io.scan(write_dataset(path / layout, rows))
    plan = make_plan(pipelines.trajectory_returns(dataset, "last").collect(), config)
    return load_batch(dataset, plan, plan.batches[0], layout)


def some_trajectories(**values: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    rewards = {"a": (1.0, 0.0, 0.5), "b": (0.0, 1.0)}
    rows = [
        row
        for name, group in rewards.items()
        for number, reward in enumerate(group)
        for row in two_step_trajectory(rng, name, number, reward, **values)
    ]
    rows[0]["loss_mask"] = [True, False, False, False]
    return rows


def gradients_of_layouts(path: Path, **settings: Any) -> tuple[Tensor, Tensor]:
    rows = some_trajectories(rollout_logprobs=[-4.0, -3.0, -5.0, -4.5])
    torch.manual_seed(0)
    step_rows, merged = (
        gradient_of_update(tiny_policy(), batch_of(rows, path, layout), corrects=True, **settings)
        for layout in ("step", "merge")
    )
    return step_rows, merged


INVARIANT = [
    *({"policy_loss_type": name} for name in ("regular", "cispo", "sapo", "kl_cov")),
    {"loss_reduction": "prompt_mean"},
    {"loss_reduction": "trajectory_mean"},
    {"token_mask_is_threshold_low": 0.1, "token_mask_is_threshold_high": 5.0},
    {"policy_loss_type": "dppo", "loss_reduction": "trajectory_mean"} | ON_SAMPLER,
]
BY_ROW = [
    {"loss_reduction": "sequence_mean"},
    {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 8},
    {"tis_ratio_type": "sequence"},
    {"sequence_mask_metric": "geometric", "geo_mask_low": 0.5, "geo_mask_high": 1.5},
    {"outlier_token_is_threshold_high": 3.0},
]


@pytest.mark.parametrize("settings", INVARIANT, ids=named)
def test_merging_changes_no_gradient_of_what_is_by_token_trajectory_or_group(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    step_rows, merged = gradients_of_layouts(tmp_path, **settings)
    assert relative_difference(step_rows, merged) < 1e-4


@pytest.mark.parametrize("settings", BY_ROW, ids=named)
def test_merging_changes_the_gradient_of_what_is_by_row_and_is_warned_about(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    step_rows, merged = gradients_of_layouts(tmp_path, **settings)
    assert relative_difference(step_rows, merged) > 1e-2
    config = TrainConfig(dataset="d", model="m", out="o", sequence_layout="step", **settings)
    counts = {"num_trained_tokens": 9, "num_trained_groups": 2, "num_trajectories": 5}
    warning = warnings_about(counts | {"num_rows": 10}, config)["rows"]
    assert warning.startswith("5 trajectories are 10 rows")
    assert "hint: --set sequence_layout=merge" in warning
    assert "rows" not in warnings_about(counts | {"num_rows": 5}, config)


def test_gspo_differs_by_layout_once_the_policy_has_moved(tmp_path: Path) -> None:
    found = {}
    for layout in ("step", "merge"):
        batch = batch_of(some_trajectories(), tmp_path, layout)
        learner = learner_of(tiny_policy())
        old = policy_logprobs(learner, batch, forests_of(batch))
        old = old + torch.where(batch.advantages > 0, 0.3, 0.1) * torch.sin(
            torch.arange(len(old)) if layout == "merge" else torch.arange(len(old)) * 2.0
        )
        found[layout] = update(learner, batch, forests_of(batch), old)["loss"]
    assert found["step"] != pytest.approx(found["merge"], rel=1e-6)


def test_reference_that_is_the_policy_has_no_divergence_and_no_gradient() -> None:
    case = Case(kl_loss_coef=0.5)
    forests = forests_of(case.batch)
    own = policy_logprobs(learner_of(case.policy), case.batch, forests)
    learner = learner_of(case.policy, kl_loss_coef=0.5)
    metrics = update(learner, case.batch, forests, None, own)
    assert metrics["policy_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"], abs=1e-6)
    shifted = update(learner, case.batch, forests, None, own - 0.5)
    assert shifted["policy_kl"] == pytest.approx(math.exp(-0.5) + 0.5 - 1, rel=1e-4)
    assert shifted["loss"] == pytest.approx(shifted["policy_loss"] + 0.5 * shifted["policy_kl"])


def test_entropy_bonus_alone_raises_the_entropy() -> None:
    case = Case(entropy_loss_coef=1.0)
    case.batch.advantages.zero_()
    learner = learner_of(case.policy, learning_rate=0.1, **case.settings)
    case.policy.entropy_gradient = True
    entropy = [
        update(learner, case.batch, forests_of(case.batch), None)["policy_entropy"]
        for _ in range(4)
    ]
    assert entropy == sorted(entropy)
    assert entropy[-1] > entropy[0] + 1e-3


def test_correction_metrics_do_not_depend_on_micro_batches() -> None:
    settings = CORRECTIONS[2] | CORRECTIONS[4] | CORRECTIONS[5] | {"tis_ratio_type": "sequence"}
    case = Case(**settings)
    found = []
    for budget in (12, 4096):
        learner = learner_of(case.new_policy(), corrects=True, **settings)
        found.append(update(learner, case.batch, forests_of(case.batch, budget), case.old))
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = some_trajectories(rollout_logprobs=[-4.0, -3.0, -5.0, -4.5])
    path = tmp_path_factory.mktemp("data") / "ds"
    return write_dataset(path, rows, logprobs_mode="processed")


def run(dataset: str, model: str, out: Path, **settings: Any) -> list[dict[str, Any]]:
    defaults = {"groups_per_mini_batch": 1, "epochs_per_batch": 2, "learning_rate": 1e-3}
    config = TrainConfig(dataset=dataset, model=model, out=str(out), **defaults | settings)
    trainer.train(config)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("settings", EVERYTHING, ids=named)
def test_every_loss_reduction_and_correction_runs_end_to_end(
    settings: dict[str, Any], dataset: str, model: str, tmp_path: Path
) -> None:
    lines = run(dataset, model, tmp_path / "run", **settings)
    assert len(lines) == 4
    assert [line["skipped"] for line in lines] == [0] * 4
    assert all(math.isfinite(v) for line in lines for v in line.values() if v is not None)
    assert all(line["grad_norm"] is not None for line in lines)


def test_supervised_training_needs_no_reward_and_makes_every_group_likelier(
    model: str, tmp_path: Path
) -> None:
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


def test_reference_model_is_another_models_directory(
    dataset: str, model: str, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=5)
    own = run(dataset, model, tmp_path / "own", kl_loss_coef=0.1)
    far = run(dataset, model, tmp_path / "far", kl_loss_coef=0.1, reference_model=other)
    assert own[0]["policy_kl"] == pytest.approx(0, abs=1e-6)
    assert own[-1]["policy_kl"] > 0
    assert far[0]["policy_kl"] > 0.5


def test_reference_has_the_numerics_of_the_policy(dataset: str, model: str, tmp_path: Path) -> None:
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
        ({"sequence_mask_metric": "product"}, "a mask by importance ratios"),
        ({"tis_ratio_type": "sequence"}, "tis_ratio_type sequence"),
    ],
)
def test_what_needs_the_samplers_log_probabilities_is_refused_without_them(
    settings: dict[str, Any], named: str, model: str, tmp_path: Path
) -> None:
    dataset = write_dataset(tmp_path / "ds", some_trajectories())
    with pytest.raises(RolloutError, match=f"rollout_logprobs: .* got none, .* for .*{named}"):
        run(dataset, model, tmp_path / "run", **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy_loss_type": "cispo", "cispo_anchor": "rollout"}, "tis_ratio_type to be none"),
        ({"policy_loss_type": "dppo"}, "tis_ratio_type to be none"),
        ({"policy_loss_type": "cross_entropy", "sequence_mask_metric": "product"}, "has none"),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "max_seq_len: got none"),
        ({"token_mask_is_threshold_low": 0.5}, "both or none"),
        ({"geo_mask_low": 1.2}, "geo_mask_low and geo_mask_high: got 1.2 and 1.01"),
        ({"reference_model": "m"}, "kl_loss_coef or kl_reward_coef above 0"),
        ({"kl_loss_coef": 0.1, "kl_reward_coef": 0.1}, "one of them to be 0"),
        ({"policy_loss_type": "cross_entropy", "kl_reward_coef": 0.1}, "uses no rewards"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c: got 1.0"),
        ({"kl_loss_coef": -1.0}, "kl_loss_coef: got -1.0"),
        ({"kl_cov_frac": 1.5}, "kl_cov_frac: got 1.5, expected at most 1"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(RolloutError, match=named):
        TrainConfig(dataset="d", model="m", out="o", **settings)


@pytest.mark.parametrize("name", ["gspo", "sapo"])
def test_losses_meant_for_another_reduction_say_so(name: Any) -> None:
    counts = {"num_trained_tokens": 9, "num_trained_groups": 2}
    config = {"dataset": "d", "model": "m", "out": "o", "policy_loss_type": name}
    assert (
        f"{name} is meant for loss_reduction sequence_mean"
        in (warnings_about(counts, TrainConfig(**config))["loss_reduction"])
    )
    assert not warnings_about(counts, TrainConfig(**config, loss_reduction="trajectory_mean"))
