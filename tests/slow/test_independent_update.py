"""Whole runs against `independent_update`, which was written from the documentation in float64."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trainer
from tests.helpers import independent_update as independent
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import step, write_dataset

Settings = dict[str, Any]
FACTORS: dict[str, list[Settings]] = {
    "loss": [
        {"policy_loss_type": "regular", "eps_clip_low": 0.02, "eps_clip_high": 0.03},
        {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.02, "eps_clip_low": 0.02},
        {"policy_loss_type": "gspo", "eps_clip_low": 0.01, "eps_clip_high": 0.01},
        {"policy_loss_type": "cispo", "cispo_eps_clip_low": 0.02, "cispo_eps_clip_high": 0.03},
        {"policy_loss_type": "cispo", "cispo_anchor": "rollout", "cispo_eps_clip_high": 0.2},
        {"policy_loss_type": "sapo", "sapo_tau_pos": 2.0},
        {"policy_loss_type": "rollout_is", "eps_clip_high": 0.3},
        {"policy_loss_type": "dppo", "dppo_delta_low": 0.02, "dppo_delta_high": 0.01},
        {"policy_loss_type": "dppo", "dppo_type": "binary_kl", "dppo_delta_low": 0.002,
         "dppo_delta_high": 0.001},
        {"policy_loss_type": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.1,
         "clip_cov_ub": 1.0},
        {"policy_loss_type": "kl_cov", "kl_cov_frac": 0.3, "ppo_kl_coef": 0.5},
        {"policy_loss_type": "importance_sampling"},
        {"policy_loss_type": "cross_entropy"},
    ],
    "estimator": [
        {"estimator": "grpo"},
        {"estimator": "grpo", "normalize_by_std": False},
        {"estimator": "grpo", "batch_normalize": True},
        {"estimator": "rloo"},
        {"estimator": "maxrl"},
        {"estimator": "gdpo", "reward_weights": {"a": 1.0, "b": -0.3}},
        {"estimator": "gdpo", "reward_weights": {"b": 2.0}, "batch_normalize": False},
        {"estimator": "reinforce++", "gamma": 0.9},
        {"estimator": "gae", "gamma": 0.95, "gae_lambda": 0.9,
         "critic_learning_rate": 1e-2},
    ],
    "correction": [
        {"tis_ratio_type": None},
        {},
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2},
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1},
        {"sequence_mask_metric": "product"},
        {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25,
         "sequence_mask_metric": "geometric", "geo_mask_low": 0.97, "geo_mask_high": 1.03},
        {"outlier_token_is_threshold_low": 0.65, "outlier_token_is_threshold_high": 1.6},
        {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25},
        {"outlier_token_is_threshold_high": 1.8, "token_mask_is_threshold_low": 0.8,
         "token_mask_is_threshold_high": 1.25, "sequence_mask_metric": "product",
         "product_mask_low": 0.7, "product_mask_high": 1.4},
    ],
    "terms": [
        {},
        *({"kl_loss_coef": 0.2, "kl_estimator_type": k} for k in ("k1", "k2", "k3", "abs")),
        {"entropy_loss_coef": 0.05},
        {"kl_loss_coef": 0.05, "entropy_loss_coef": 0.02},
        {"kl_reward_coef": 0.1, "kl_estimator_type": "k1"},
        {"kl_reward_coef": 0.2, "kl_ctrl_type": "adaptive", "kl_horizon": 20, "kl_target": 0.02},
    ],
    "reduction": [
        {"reduction": "token_mean"},
        {"reduction": "sequence_mean"},
        {"reduction": "seq_mean_token_sum_norm", "max_seq_len": 16},
        {"reduction": "prompt_mean"},
        {"reduction": "trajectory_mean"},
    ],
    "layout": [
        {"sequence_layout": "merge"},
        {"sequence_layout": "step", "tokens_per_micro_batch": 128},
        {"sequence_layout": "tree", "tree_scope": "group"},
        {"sequence_layout": "tree", "tree_scope": "trajectory", "tokens_per_micro_batch": 96},
    ],
    "updates": [
        {"groups_per_batch": 3, "groups_per_mini_batch": 3},
        {"groups_per_batch": 6, "groups_per_mini_batch": 3, "epochs_per_batch": 2},
        {"groups_per_batch": 6, "groups_per_mini_batch": 6, "epochs_per_batch": 2},
    ],
    "failed": [{"failed": "group"}, {"failed": "trajectory"}],
    "outcome": [{"outcome": "last"}, {"outcome": "sum"}],
    "partial": [
        {"partial_groups": "train"},
        {"partial_groups": "mask"},
        {"partial_groups": "train", "drop_zero_variance_groups": True},
    ],
    "temperature": [{"mixed": True}, {"mixed": False}],
}  # fmt: skip
FIXED: Settings = {"learning_rate": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.05}
MOST = 1e-3
"""Relative difference of the weights' change."""


def is_allowed(settings: Settings) -> bool:
    """Whether the configuration is none that is refused."""
    anchored = settings["policy_loss_type"] in ("rollout_is", "dppo")
    anchored |= settings.get("cispo_anchor") == "rollout"
    masks = any("threshold" in key or "mask_metric" in key for key in settings)
    if anchored and settings.get("tis_ratio_type") is not None:
        return False
    if settings["estimator"] == "gdpo" and settings.get("kl_reward_coef"):
        return False
    if settings["policy_loss_type"] == "cross_entropy":
        refused = [masks, settings.get("kl_reward_coef"), settings.get("tis_ratio_type")]
        return not any(refused) and settings["estimator"] != "gae"
    return True


def covering(seed: int = 0) -> list[Settings]:
    """Configurations in which every two values of different factors that may meet do meet."""
    rng, names = random.Random(seed), list(FACTORS)
    missing = {
        frozenset([(a, i), (b, j)])
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(FACTORS[a])), range(len(FACTORS[b])))
    }
    found: list[Settings] = []
    while missing:
        first = min(missing, key=sorted)
        best, gain = None, frozenset[Any]()
        for _ in range(60):
            drawn = {name: rng.randrange(len(FACTORS[name])) for name in names} | dict(first)
            pairs = {frozenset(pair) for pair in itertools.combinations(drawn.items(), 2)}
            if is_allowed(merged(drawn)) and len(pairs & missing) > len(gain):
                best, gain = drawn, frozenset(pairs & missing)
        missing -= gain or {first}
        if best is not None:
            found.append(merged(best))
    return found


def merged(drawn: dict[str, int]) -> Settings:
    return {k: v for name, i in drawn.items() for k, v in FACTORS[name][i].items()}


def random_tokens(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(independent.VOCAB) for _ in range(rng.randint(low, high))]


def next_prompt(rng: random.Random, steps: list[Settings]) -> list[int]:
    """It continues the last step, forks from another, changes its end, or begins anew."""
    if not steps or rng.random() < 0.12:
        return random_tokens(rng, 2, 6)
    parent = steps[-1] if rng.random() < 0.7 else rng.choice(steps)
    whole = parent["prompt_token_ids"] + parent["response_ids"]
    if rng.random() < 0.15:
        whole = whole[: rng.randint(1, len(whole) - 1)]
    return whole + random_tokens(rng, 0 if len(steps) % 2 else 1, 3)


def trajectory(rng: random.Random, name: str, number: int, model: Any, *, mixed: bool) -> Any:
    """Steps of a trajectory: ragged, some masked, of several lineages, with rewards on the way."""
    usual = rng.choice([0.7, 1.0, 1.4, None]) if mixed else 1.0
    per_token, steps = rng.random() < 0.3, list[Settings]()
    for index in range(rng.randint(1, 5)):
        prompt, response = next_prompt(rng, steps), random_tokens(rng, 1, 6)
        temperature = rng.choice([0.0, 1.2, usual]) if mixed and rng.random() < 0.2 else usual
        mask = [rng.random() < 0.8 for _ in response] if rng.random() < 0.85 else [False] * 9
        earned = [rng.choice([0.0, 0.0, -0.5, 0.25, 1.0]) for _ in response]
        sampled = logprobs(model, prompt, response, temperature or 1.0)
        steps.append(
            step(
                name, number, index, prompt, response,
                loss_mask=mask[: len(response)],
                temperature=temperature,
                rollout_logprobs=[min(value + rng.gauss(0, 0.2), 0.0) for value in sampled],
                reward=sum(earned),
                rewards=earned if per_token else None,
                policy_version=rng.randrange(3),
            )
        )  # fmt: skip
    steps[-1]["is_last_step"] = True
    return steps


def logprobs(model: Any, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double()
    found = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return [float(found[i, token]) for i, token in enumerate(response)]


def some_steps(model: Any, *, mixed: bool) -> list[Settings]:
    """Six groups: a lone trajectory, a lone survivor, one without variance, failures."""
    rng, rows = random.Random(10), list[Settings]()
    for group, size in enumerate([3, 2, 3, 1, 3, 3]):
        for number in range(size):
            steps = trajectory(rng, f"g{group}", number, model, mixed=mixed)
            if (group, number) in ((1, 0), (2, 1)):
                for row in steps:
                    row |= {"error": "lost", "reward": None, "rewards": None}
                    row["rollout_logprobs"] = None
            if (group, number) == (4, 1):
                nothing = {"loss_mask": [], "temperature": None, "rollout_logprobs": None}
                values = {"error": "no call", "rewards": None, "policy_version": None, **nothing}
                steps = [step("g4", 1, 0, [], [], is_last_step=True, **values)]
            if group == 5:
                for row in steps:
                    row |= {"reward": float(row["is_last_step"]), "rewards": None}
            for row in steps[rng.randrange(len(steps)) :]:
                values = {"a": rng.choice([0.0, 1.0]), "b": 1.0 if group == 3 else rng.gauss(5, 2)}
                row["metrics"] = [{"key": key, "value": value} for key, value in values.items()]
            rows += steps
    return rows


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Models and datasets, in memory and on disk."""
    folder = tmp_path_factory.mktemp("given")
    model, reference = independent.tiny_model(0), independent.tiny_model(0, perturbed_by=0.02)
    model.save_pretrained(folder / "model")
    reference.save_pretrained(folder / "reference")
    found: Settings = {"folder": folder, "model": model, "reference": reference}
    for mixed in (True, False):
        rows = some_steps(model, mixed=mixed)
        path = write_dataset(folder / f"mixed_{mixed}", rows, logprobs_mode="processed")
        found[f"mixed_{mixed}"] = rows, path
    return found


def difference(settings: Settings, given: Settings, out: Path) -> float:
    """How far the weights' change is from the independent one's, relative to its size."""
    settings = FIXED | settings
    rows, dataset = given[f"mixed_{settings.pop('mixed')}"]
    paths = {"dataset": dataset, "model": str(given["folder"] / "model"), "out": str(out)}
    if settings.get("kl_loss_coef") or settings.get("kl_reward_coef"):
        paths["reference_model"] = str(given["folder"] / "reference")
    result = trainer.train(train_config(**paths, **settings))
    trained = load_file(Path(result.checkpoint) / "model.safetensors")
    expected, faint = independent.run(rows, given["model"], given["reference"], settings)
    apart = size = 0.0
    assert sum(int(f.sum()) for f in faint.values()) < 555  # 5 %
    for name, before in given["model"].named_parameters():
        change = expected[name] - before.detach().double()
        apart += float((trained[name].double() - expected[name])[~faint[name]].pow(2).sum())
        size += float(change[~faint[name]].pow(2).sum())
    assert size > 0
    return (apart / size) ** 0.5


def named(settings: Settings) -> str:
    short = ("policy_loss_type", "estimator", "reduction", "sequence_layout")
    return "-".join(str(settings[key]) for key in short)


GRID = covering()
QUICK = GRID[::32]


@pytest.mark.slow
@pytest.mark.parametrize("settings", QUICK, ids=named)
def test_a_run_changes_the_weights_as_the_independent_one_does(
    settings: Settings, given: Settings, tmp_path: Path
) -> None:
    assert difference(settings, given, tmp_path / "run") < MOST


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [s for s in GRID if s not in QUICK], ids=named)
def test_every_two_settings_together_change_the_weights_as_independently(
    settings: Settings, given: Settings, tmp_path: Path
) -> None:
    assert difference(settings, given, tmp_path / "run") < MOST
