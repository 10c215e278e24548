"""Make reference_advantages.json: what SkyRL's own functions make of the inputs it holds too.

Run in an environment of its own, where `skyrl==0.3.0` is installed (see README.md here):

    python make_reference_advantages.py reference_advantages.json
"""

import json
import random
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

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

NUM_ROWS, NUM_TOKENS, GROUPS = 8, 6, ["a", "a", "a", "b", "c", "c", "d", "d"]


def inputs(rng: random.Random) -> dict:
    """Eighths, so that sums and means are exact; the returns of group d are equal."""

    def table(low: int, high: int) -> list:
        return [[rng.randint(low, high) / 8 for _ in range(NUM_TOKENS)] for _ in range(NUM_ROWS)]

    rewards, values = table(0, 16), table(-16, 16)
    rewards[-1] = rewards[-2]
    return {
        "groups": GROUPS,
        "rewards": rewards,
        "values": values,
        "moved_values": [[v + rng.randint(-4, 4) / 8 for v in row] for row in values],
        "gamma": 0.9,
        "lam": 0.75,
        "value_clip": 0.2,
    }


def batch_normalized(advantages: torch.Tensor) -> list:
    """As the trainer does it: with a mask of ones, its unmasked mean is the masked one."""
    mask = torch.ones_like(advantages)
    names = ("advantages", "response_mask", "loss_mask")
    batch = TrainingInputBatch(dict(zip(names, (advantages, mask, mask), strict=True)))
    batch.metadata = {}
    algorithm = SimpleNamespace(batch_normalize=True, reduction="token_mean", max_seq_len=None)
    config = SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=1)
    trainer = SimpleNamespace(cfg=SimpleNamespace(trainer=config))
    scaled = RayPPOTrainer._normalize_advantages(trainer, batch, [(0, NUM_ROWS)])
    return (scaled["advantages"] * mask.sum()).tolist()  # the reduction's divisor, undone


def main() -> None:
    given = inputs(random.Random(0))
    rewards, values, moved = (
        torch.tensor(given[name], dtype=torch.float64)
        for name in ("rewards", "values", "moved_values")
    )
    mask, index = torch.ones_like(rewards), np.array(GROUPS)
    gamma, lam = given["gamma"], given["lam"]
    gae, returns = ppo_utils.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    critic = SimpleNamespace(value_clip=given["value_clip"])
    loss, clipped = ppo_utils.ppo_critic_loss(moved, values, returns, critic, mask)
    plain, _ = ppo_utils.ppo_critic_loss(
        moved, values, returns, SimpleNamespace(value_clip=None), mask
    )
    outcome = {
        "grpo": ppo_utils.compute_grpo_outcome_advantage(rewards, mask, index),
        "grpo_without_std": ppo_utils.compute_grpo_outcome_advantage(
            rewards, mask, index, grpo_norm_by_std=False
        ),
        "rloo": ppo_utils.compute_rloo_outcome_advantage(rewards, mask, index),
        "maxrl": ppo_utils.compute_maxrl_advantage(rewards, mask, index),
    }
    found = {name: advantages[:, 0].tolist() for name, (advantages, _) in outcome.items()}
    plus_plus, discounted = ppo_utils.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, gamma
    )
    found |= {
        "gae": gae.tolist(),
        "gae_returns": returns.tolist(),
        "reinforce++": plus_plus.tolist(),
        "reinforce++_returns": discounted.tolist(),
        "batch_normalized": batch_normalized(values),
        "critic_loss": loss.item(),
        "critic_loss_unclipped": plain.item(),
        "values_clipfrac": clipped,
    }
    Path(sys.argv[1]).write_text(json.dumps({"inputs": given, "outputs": found}) + "\n")


if __name__ == "__main__":
    main()
