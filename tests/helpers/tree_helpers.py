"""Rows that share tokens in every way that rollouts do."""

import zlib

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import strategies as st

from schemas.ragged import Ragged
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import make_batch, run_of, update_with
from trainer.batch import cut_batch
from trainer.batches.plan import make_plan
from trainer.batches.tree import make_trie

TrajectoryIds = list[tuple[str, str]]


@st.composite
def families(draw, max_trajectories=3):
    """Steps of one or two groups of trajectories.

    A step goes on from what an earlier step of its group holds, up to any of its tokens, from its
    response as from its prompt, or from nothing; some are the same as an earlier one. Few
    different tokens, so that unrelated rows share prefixes too.
    """
    token = st.integers(0, 3)
    rows = []
    ids = []
    for group in range(draw(st.integers(1, 2))):
        known = [[]]
        for trajectory in range(draw(st.integers(1, max_trajectories))):
            for _ in range(draw(st.integers(1, 4))):
                before = draw(st.sampled_from(known))
                kept = before[: draw(st.integers(0, len(before)))]
                prompt = (kept + draw(st.lists(token, max_size=3)))[:20] or [draw(token)]
                response = draw(st.lists(token, min_size=1, max_size=4))
                mask = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
                known.append(prompt + response)
                rows.append((prompt, response, mask))
                ids.append((f"g{group}", f"g{group}_{trajectory}"))
                if draw(st.integers(0, 3)) == 0:
                    rows.append((prompt, response, mask))
                    ids.append(ids[-1])
    if not any(any(mask) for _, _, mask in rows):
        rows[0][2][0] = True
    return rows, ids


def config_of(**settings):
    given = {"sequence_layout": "tree", "partial_groups": "train", **settings}
    return train_config(dataset="d", model="m", out="o", **given)


def batch_of(family, **values):
    return make_batch(family[0], trajectories=family[1], **values)


def mini_batch_of(batch, **settings):
    """The whole batch as one mini-batch."""
    (found,) = cut_batch(batch, config_of(**settings).batch)
    return found


def trie_of(rows):
    """Whole rows of one group."""
    tokens = Ragged(
        np.array([t for row in rows for t in row], dtype=np.int32),
        np.cumsum([0, *map(len, rows)]),
        np.ones(len(rows), dtype=np.bool_),
    )
    nothing = Ragged(np.zeros(0, np.int32), np.zeros(len(rows) + 1, np.int64), tokens.valid)
    group = np.zeros(len(rows), dtype=np.int64)
    return make_trie(tokens, nothing, tokens.lengths, group, np.arange(len(rows)))


def parents(forest):
    """[N] position of each token's parent, -1 for a root, from `subtree_end` alone."""
    found, way = [], list[int]()
    for position, end in enumerate(forest.subtree_end.tolist()):
        while way and forest.subtree_end[way[-1]] <= position:
            way.pop()
        assert end > position
        found.append(way[-1] if way else -1)
        way.append(position)
    return np.array(found)


def batch_of_estimator(family, config, seed):
    """Steps with random rewards; outcome advantages are those of the estimator already.

    What tokens have of their own depends on what stands before them alone, so that rows which are
    the same stay the same.
    """
    rows, ids = family
    rng = np.random.default_rng(seed)
    rewards = {name: float(rng.normal()) for name in dict.fromkeys(ids)}
    returns = pl.DataFrame(
        {
            "instance_id": [group for group, _ in rewards],
            "trajectory_id": [trajectory for _, trajectory in rewards],
            "return": list(rewards.values()),
            "error": pl.Series([None] * len(rewards), dtype=pl.String),
        }
    )
    plan = make_plan(returns, config).trajectories
    advantage = dict(zip(plan["trajectory_id"], plan["advantage"], strict=True))
    last = {trajectory: row for row, trajectory in enumerate(ids)}
    return make_batch(
        rows,
        trajectories=ids,
        advantages=[advantage[trajectory] for _, trajectory in ids],
        rewards=[rewards[name] * (last[name] == row) for row, name in enumerate(ids)],
        temperatures=rng.uniform(0.5, 2.0, len(rows)).tolist(),
        rollout_logprobs=[[-3.0 * noise for noise in noises(row, 1)] for row in rows],
    )


def noises(row, salt):
    """A number in [0, 1) for each response token and all before it."""
    prompt, response, _ = row
    prefixes = (bytes([salt, *prompt, *response[: n + 1]]) for n in range(len(response)))
    return [zlib.crc32(prefix) / 2**32 for prefix in prefixes]


def updated(policy, batch, forests, old, ref, **settings):
    """Metrics of an update that moves nothing, and its gradient by parameter."""
    learner = run_of(policy, max_grad_norm=1e9, learning_rate=1e-30, **settings)
    kept = {}

    def keep(*_):
        kept.update({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})

    torch.manual_seed(0)
    hook = learner.optimizer.register_step_pre_hook(keep)
    metrics = update_with(learner, batch, forests, old, ref)
    hook.remove()
    return metrics, kept


def check_same(found, expected, tolerance=1e-5):
    """Every metric but what depends on how rows were packed, and every parameter's gradient.

    A gradient that vanishes is compared with the whole one.
    """
    cut = {"num_forwarded_tokens", "num_micro_batches"}
    metrics, wanted = ({k: v for k, v in m.items() if k not in cut} for m, _ in (found, expected))
    assert metrics == pytest.approx(wanted, rel=10 * tolerance, abs=tolerance)
    gradient, other = found[1], expected[1]
    assert gradient.keys() == other.keys()
    whole = float(torch.cat([g.flatten() for g in other.values()]).norm())
    for name, wanted_gradient in other.items():
        difference = float((gradient[name] - wanted_gradient).norm())
        assert difference <= tolerance * (float(wanted_gradient.norm()) + 0.1 * whole) + 1e-9, name
