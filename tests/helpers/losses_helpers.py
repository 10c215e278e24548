"""Targets for tests of losses: drawn ones, and those that SkyRL's own functions were given."""

import json

import numpy as np
import torch
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.helpers.trainer_helpers import one_group
from trainer.algorithms.losses import (
    Targets,
    clip_cov_selection,
    covariances,
    kl_cov_selection,
    regular,
)
from trainer.algorithms.own_functions import call_function

REFERENCE = json.loads((ROOT / "tests" / "data" / "reference_losses.json").read_text())
SETTINGS = {
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.3,
    "clip_ratio_c": 1.2,
    "cispo_eps_clip_low": 0.1,
    "cispo_eps_clip_high": 0.2,
    "tis_ratio_type": None,
}
CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.3}

ON_SAMPLER = {"tis_ratio_type": None}
POLICY_LOSSES = [
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
REDUCTIONS = [
    {"reduction": "token_mean"},
    {"reduction": "sequence_mean"},
    {"reduction": "seq_mean_token_sum_norm", "max_seq_len": 8},
    {"reduction": "prompt_mean"},
    {"reduction": "trajectory_mean"},
]
CORRECTIONS = [
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence"},
    {"sequence_mask_metric": "geometric", "geo_mask_low": 0.8, "geo_mask_high": 1.2},
    {"sequence_mask_metric": "product", "tis_ratio_type": None},
    {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 2.0},
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25},
]
TERMS = [
    {"kl_loss_coef": 0.1},
    {"kl_loss_coef": 0.1, "kl_estimator_type": "k2", "reduction": "sequence_mean"},
    {"entropy_loss_coef": 0.1, "reduction": "prompt_mean"},
]
EVERYTHING = [*POLICY_LOSSES, *REDUCTIONS[1:], *CORRECTIONS[1:], *TERMS]


def named(settings):
    return "-".join(str(value) for value in settings.values())


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def targets(draw):
    n = draw(st.integers(1, 12))
    logprob, flag = st.floats(-4.0, -0.01), st.booleans()

    def several(element, **kind):
        return torch.tensor(draw(st.lists(element, min_size=n, max_size=n)), **kind)

    return Targets(
        logprobs=several(logprob, dtype=torch.float64).requires_grad_(),
        old_logprobs=several(logprob, dtype=torch.float64),
        rollout_logprobs=several(logprob, dtype=torch.float64),
        advantages=several(st.floats(-3, 3), dtype=torch.float64),
        row=several(st.integers(0, 3), dtype=torch.int64),
        selected=several(flag),
    )


def reference_targets(name="regular"):
    """Targets of the reference's padded inputs, and the mask that made them."""
    given = {k: torch.tensor(v, dtype=torch.float64) for k, v in REFERENCE["inputs"].items()}
    mask = given.pop("mask").bool()
    values = {k: v[mask] for k, v in given.items()}
    selected = torch.zeros(int(mask.sum()), dtype=torch.bool)
    settings = REFERENCE["losses"][name]["settings"]
    covariance = covariances(values["advantages"], values["logprobs"])
    if name == "clip_cov":
        clipped = regular(
            values["logprobs"], values["old_logprobs"], values["advantages"], **CLIP
        ).clipped
        shares = (settings[f"clip_cov_{key}"] for key in ("ratio", "lb", "ub"))
        share, low, high = shares
        selected = clip_cov_selection(covariance, clipped, ratio=share, low=low, high=high)
    elif name == "kl_cov":
        selected = kl_cov_selection(covariance, fraction=settings["kl_cov_frac"])
    values["logprobs"].requires_grad_()
    return Targets(**values, row=mask.nonzero()[:, 0], selected=selected), mask


def some_trajectories(**values):
    rng = np.random.default_rng(3)
    rows = one_group(rng, "a", (1.0, 0.0, 0.5), **values)
    rows += one_group(rng, "b", (0.0, 1.0), **values)
    rows[0]["loss_mask"] = [True, False, False, False]
    return rows


def policy_loss(targets, function):
    """The loss of each target, as the objective computes it."""
    return call_function(function, **{name: getattr(targets, name) for name in function.inputs})


def advantages_of_returns(returns, group_index, estimator):
    """The advantage of each trajectory, as the plan computes it."""
    arrays = {"returns": returns, "group_index": group_index}
    return call_function(estimator, **{name: arrays[name] for name in estimator.inputs})
