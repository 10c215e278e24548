"""Make reference_losses.json: losses, gradients and metrics of SkyRL's own functions.

Run in an environment of its own, where `skyrl==0.3.0` is installed (see README.md here):

    python make_reference_losses.py reference_losses.json

Losses whose divisors the reference folds into the advantages are given raw advantages.
"""

import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import typing_extensions

typing.TypedDict = (
    typing_extensions.TypedDict
)  # before the import: pydantic refuses typing's on 3.11

from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402

LENGTHS = (5, 1, 6, 3)  # trained tokens per row, of 6
LOSSES = {
    "regular": {},
    "dual_clip": {},
    "gspo": {},
    "cispo": {},
    "sapo": {},
    "rollout_is": {},
    "dppo": {},
    "dppo binary_kl": {"dppo_type": "binary_kl", "dppo_delta_low": 0.05, "dppo_delta_high": 0.03},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 0.8},
    "kl_cov": {"kl_cov_frac": 0.3, "ppo_kl_coef": 0.7},
    "importance_sampling": {},
    "cross_entropy": {},
}
CORRECTIONS = {
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2},
    "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.0},
    "product": {"sequence_mask_metric": "product", "product_mask_low": 0.6},
    "outlier": {"outlier_token_is_threshold_low": 0.65},
    "outlier both": {
        "outlier_token_is_threshold_low": 0.65,
        "outlier_token_is_threshold_high": 1.7,
    },
    "token mask": {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25},
    "all": {
        "tis_ratio_type": "sequence",
        "sequence_mask_metric": "geometric",
        "geo_mask_low": 0.9,
        "geo_mask_high": 1.3,
        "sequence_tis_ratio_clip_high": 1.05,
        "outlier_token_is_threshold_low": 0.65,
        "token_mask_is_threshold_low": 0.7,
        "token_mask_is_threshold_high": 1.5,
    },
}
OFF = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_low": 0.99,
    "geo_mask_high": 1.01,
    "product_mask_low": 0.5,
    "product_mask_high": 2.0,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}


def inputs() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    shape = (len(LENGTHS), 6)
    logprobs = -rng.exponential(1.0, shape)
    given = {
        "logprobs": logprobs,
        "old_logprobs": np.minimum(logprobs + rng.normal(0, 0.3, shape), -1e-3),
        "rollout_logprobs": np.minimum(logprobs + rng.normal(0, 0.3, shape), -1e-3),
        "advantages": rng.normal(0, 1, shape),
        "mask": np.arange(6) < np.array(LENGTHS)[:, None],
    }
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in given.items()}


def config(name: str, settings: dict[str, typing.Any]) -> SimpleNamespace:
    s = {
        "clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_frac": 0.2,
        "ppo_kl_coef": 1.0, "dppo_type": "binary_tv", "dppo_delta_low": 0.2, "dppo_delta_high": 0.2,
    } | OFF | settings  # fmt: skip
    return SimpleNamespace(
        policy_loss_type=name,
        reduction="sequence_mean",
        eps_clip_low=0.2,
        eps_clip_high=0.3,
        clip_ratio_c=1.2,
        cispo=SimpleNamespace(cispo_eps_clip_low=0.1, cispo_eps_clip_high=0.2),
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        dppo=SimpleNamespace(
            dppo_type=s["dppo_type"],
            delta_low=s["dppo_delta_low"],
            delta_high=s["dppo_delta_high"],
        ),
        clip_cov=SimpleNamespace(
            clip_ratio=s["clip_cov_ratio"],
            clip_cov_lb=s["clip_cov_lb"],
            clip_cov_ub=s["clip_cov_ub"],
        ),
        kl_cov=SimpleNamespace(kl_cov_frac=s["kl_cov_frac"], ppo_kl_coef=s["ppo_kl_coef"]),
        off_policy_correction=SimpleNamespace(**{k: s[k] for k in OFF}),
    )


def run_loss(name: str, settings: dict[str, typing.Any]) -> dict[str, typing.Any]:
    given = inputs()
    logprobs = given["logprobs"].requires_grad_()
    loss, metrics = ppo_utils.PolicyLossRegistry.get(name)(
        logprobs,
        given["old_logprobs"],
        given["advantages"],
        config(name, settings),
        loss_mask=given["mask"],
        rollout_logprobs=given["rollout_logprobs"],
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {
        "settings": settings,
        "loss": loss.item(),
        "gradient": gradient.tolist(),
        "metrics": metrics,
    }


def reduction(name: str) -> list[list[float]]:
    given = inputs()
    ones, mask = torch.ones_like(given["mask"]), given["mask"].clone()
    mask[1] = 0
    return (
        ppo_utils.apply_loss_reduction_to_advantages_minibatch(
            ones, mask, name, 2, 100, [(0, 2), (2, 4)]
        )
        * mask
    ).tolist()


def main() -> None:
    given = inputs()
    controller = ppo_utils.AdaptiveKLController(0.1, 3.0, 100)
    controller.update(2.7, 50)
    found = {
        "inputs": {name: values.tolist() for name, values in given.items()},
        "losses": {name: run_loss(name.split()[0], s) for name, s in LOSSES.items()},
        "corrections": {name: run_loss("regular", s) for name, s in CORRECTIONS.items()},
        "reductions": {
            name: reduction(name)
            for name in (
                *("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"),
                "token_mean_legacy",
            )
        },
        "kl": {
            name: ppo_utils.compute_approx_kl(
                given["logprobs"], given["rollout_logprobs"], given["mask"], name
            ).tolist()
            for name in ("k1", "k2", "k3", "abs")
        },
        "adapted_kl_coef": controller.value,
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
