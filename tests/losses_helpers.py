"""Targets for tests of losses: drawn ones, and those that SkyRL's own functions were given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from trainer.losses.covariance import clip_cov_selection, covariances, kl_cov_selection
from trainer.losses.policy import regular
from trainer.objective import Targets

REFERENCE = json.loads((Path(__file__).parent / "data" / "reference_losses.json").read_text())
SETTINGS: dict[str, Any] = {
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.3,
    "clip_ratio_c": 1.2,
    "cispo_eps_clip_low": 0.1,
    "cispo_eps_clip_high": 0.2,
    "tis_ratio_type": None,
}
CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.3}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def targets(draw: st.DrawFn) -> Targets:
    n = draw(st.integers(1, 12))
    logprob, flag = st.floats(-4.0, -0.01), st.booleans()

    def several(element: st.SearchStrategy[Any], **kind: Any) -> Tensor:
        return torch.tensor(draw(st.lists(element, min_size=n, max_size=n)), **kind)

    return Targets(
        logprobs=several(logprob, dtype=torch.float64).requires_grad_(),
        old_logprobs=several(logprob, dtype=torch.float64),
        rollout_logprobs=several(logprob, dtype=torch.float64),
        advantages=several(st.floats(-3, 3), dtype=torch.float64),
        row=several(st.integers(0, 3), dtype=torch.int64),
        selected=several(flag),
    )


def reference_targets(name: str = "regular") -> tuple[Targets, Tensor]:
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
