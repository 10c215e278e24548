"""A training run in float64, written from docs/algorithms.md and docs/training.md alone.

Plain loops over steps and tokens, one eager Transformers forward a row, no packing, and none of the
trainer's code: a second witness of what a run comes to.
"""

import copy
import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.independent_loss import (
    critic_loss,
    divergence,
    logprobs_of,
    policy_loss,
    values_of,
)
from tests.helpers.independent_rows import by_trajectory, layout, masks_and_returns, varies

VOCAB = 61
DEFAULTS = {
    "outcome": "last", "estimator": "grpo", "normalize_by_std": True,
    "batch_normalize": False, "gamma": 1.0, "gae_lambda": 1.0, "failed": "group",
    "partial_groups": "refuse", "drop_zero_variance_groups": False, "groups_per_batch": 8,
    "groups_per_mini_batch": 8, "epochs_per_batch": 1, "sequence_layout": "merge",
    "learning_rate": 1e-6, "weight_decay": 0.01, "betas": (0.9, 0.999), "max_grad_norm": 1.0,
    "critic_learning_rate": 5e-6, "value_clip": 0.2, "policy_loss_type": "regular",
    "eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0, "cispo_eps_clip_low": 1.0,
    "cispo_eps_clip_high": 4.0, "cispo_anchor": "old", "dppo_type": "binary_tv",
    "dppo_delta_low": 0.2, "dppo_delta_high": 0.2, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05,
    "clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_frac": 0.2,
    "ppo_kl_coef": 1.0, "reduction": "token_mean", "max_seq_len": None,
    "tis_ratio_type": "auto", "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None, "geo_mask_low": 0.99, "geo_mask_high": 1.01,
    "product_mask_low": 0.5, "product_mask_high": 2.0, "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None, "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None, "kl_loss_coef": 0.0, "kl_reward_coef": 0.0,
    "kl_ctrl_type": "fixed", "kl_target": 0.1, "kl_horizon": 10000, "kl_estimator_type": "k3",
    "entropy_loss_coef": 0.0,
}  # fmt: skip


def tiny_model(seed, perturbed_by=0.0):
    """Random weights, large enough that every attended token matters."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(2.0)
            weight.add_(perturbed_by * torch.randn_like(weight))
    return model


def run(rows, model, reference, settings):
    """The weights after a run over steps, one a row of the dataset, in order; `Adam.faint`."""
    c = DEFAULTS | {"batch_normalize": settings.get("estimator") == "gdpo"} | settings
    policy = copy.deepcopy(model).double()
    policy.set_attn_implementation("eager")
    frozen = copy.deepcopy(reference).double()
    frozen.set_attn_implementation("eager")
    critic = copy.deepcopy(policy.model)
    size = policy.config.hidden_size
    head = torch.nn.Linear(size, 1, dtype=torch.float64)
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    adam = Adam(dict(policy.named_parameters()), c["learning_rate"], c)
    both = torch.nn.ModuleList([critic, head])
    critic_adam = Adam(dict(both.named_parameters()), c["critic_learning_rate"], c)
    trajectories = by_trajectory(rows)
    masked, returns = masks_and_returns(trajectories, c)
    groups = list(dict.fromkeys(steps[0]["instance_id"] for steps in trajectories.values()))
    if c["drop_zero_variance_groups"]:
        groups = [group for group in groups if varies(group, trajectories, masked, returns)]
    coef = c["kl_reward_coef"]
    for first in range(0, len(groups), c["groups_per_batch"]):
        batch = groups[first : first + c["groups_per_batch"]]
        inside = {t: s for t, s in trajectories.items() if s[0]["instance_id"] in batch}
        sequences = layout(inside, masked, c)
        tokens = [token for row in sequences for token in row.tokens]
        with torch.no_grad():
            for row in sequences:
                if row.tokens:
                    now, _ = logprobs_of(policy, row)
                    then, _ = logprobs_of(frozen, row)
                    values = values_of(critic, head, row)
                    for i, token in enumerate(row.tokens):
                        token.old, token.reference = float(now[i]), float(then[i])
                        token.value = float(values[i])
        coef = estimate(inside, masked, returns, tokens, coef, c)
        for _ in range(c["epochs_per_batch"]):
            for start in range(0, len(batch), c["groups_per_mini_batch"]):
                mini = batch[start : start + c["groups_per_mini_batch"]]
                own = [row for row in sequences if row.group in mini]
                if not any(row.tokens for row in own):
                    continue
                policy_loss(policy, own, c).backward()
                adam.step()
                if c["estimator"] == "gae":
                    critic_loss(critic, head, own, c).backward()
                    critic_adam.step()
    return {name: weight.detach() for name, weight in policy.named_parameters()}, adam.faint


class Adam:
    """AdamW, decoupled, of a gradient clipped to a norm.

    Its first steps have the size of the learning rate however small the gradient is, so an element
    whose gradient is 0 but for float32's rounding moves either way: `faint` says which those are.
    """

    def __init__(self, weights, rate, c):
        self.weights, self.rate, self.c, self.time = weights, rate, c, 0
        self.first = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.faint = {name: torch.zeros_like(w, dtype=torch.bool) for name, w in weights.items()}

    def step(self):
        found = {n: w.grad for n, w in self.weights.items() if w.grad is not None}
        norm = math.sqrt(sum(float((g**2).sum()) for g in found.values()))
        shrink = min(1.0, self.c["max_grad_norm"] / (norm + 1e-6))
        (a, b), self.time = self.c["betas"], self.time + 1
        for name, given in found.items():
            gradient, weight = given * shrink, self.weights[name]
            self.faint[name] |= (given != 0) & (given.abs() < 1e-6 * norm)
            self.first[name] = a * self.first[name] + (1 - a) * gradient
            self.second[name] = b * self.second[name] + (1 - b) * gradient**2
            first = self.first[name] / (1 - a**self.time)
            second = self.second[name] / (1 - b**self.time)
            with torch.no_grad():
                weight.mul_(1 - self.rate * self.c["weight_decay"])
                weight.sub_(self.rate * first / (second.sqrt() + 1e-8))
            weight.grad = None


def estimate(trajectories, masked, returns, tokens, coef, c):
    """Give the tokens of a batch their advantages; the KL coefficient of the next batch."""
    charges = {id(t): 0.0 for t in tokens}
    after = coef
    if c["kl_reward_coef"]:
        divergences = [
            divergence(torch.tensor(t.old - t.reference), c["kl_estimator_type"]).item()
            for t in tokens
        ]
        charges = {id(t): coef * k for t, k in zip(tokens, divergences, strict=True)}
        if c["kl_ctrl_type"] == "adaptive" and tokens:
            error = sum(divergences) / len(divergences) / c["kl_target"] - 1
            error = min(max(error, -0.2), 0.2)
            after = coef * (1 + error * len(trajectories) / c["kl_horizon"])
    if c["estimator"] in ("reinforce++", "gae"):
        along_chains(trajectories, tokens, charges, c)
    elif c["estimator"] == "gdpo":
        from_several_rewards(trajectories, masked, returns, tokens, c)
    else:
        from_returns(trajectories, masked, returns, tokens, charges, c)
    if c["batch_normalize"]:
        mean, variance = moments([t.advantage for t in tokens], bessel=False)
        for t in tokens:
            t.advantage = (t.advantage - mean) / math.sqrt(max(variance, 1e-8))
    return after


def from_several_rewards(trajectories, masked, rewards, tokens, c):
    for token in tokens:
        own = [t for t, steps in trajectories.items() if steps[0]["instance_id"] == token.group]
        token.advantage = 0.0
        for k, weight in enumerate(c["reward_weights"].values()):
            group = [rewards[t][k] for t in own if t in rewards and t not in masked]
            mean = sum(group) / len(group)
            if max(group) > min(group):
                variance = sum((r - mean) ** 2 for r in group) / (len(group) - 1)
                centred = rewards[token.trajectory][k] - mean
                token.advantage += weight * centred / (math.sqrt(variance) + 1e-6)


def from_returns(trajectories, masked, returns, tokens, charges, c):
    own = {
        t: returns[t] - sum(charges[id(k)] for k in tokens if k.trajectory == t)
        for t in trajectories
        if t not in masked
    }
    for token in tokens:
        group = [own[t] for t in own if trajectories[t][0]["instance_id"] == token.group]
        value, n = own[token.trajectory], len(group)
        mean = sum(group) / n
        if n == 1 or max(group) == min(group):
            token.advantage = 0.0
        elif c["estimator"] == "rloo":
            token.advantage = value - (sum(group) - value) / (n - 1)
        elif c["estimator"] == "maxrl":
            token.advantage = (value - mean) / (sum(map(abs, group)) / n + 1e-6)
        elif c["normalize_by_std"]:
            deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (n - 1))
            token.advantage = (value - mean) / (deviation + 1e-6)
        else:
            token.advantage = value - mean


def along_chains(trajectories, tokens, charges, c):
    for name, steps in trajectories.items():
        chain = [t for t in tokens if t.trajectory == name]
        chain.sort(key=lambda t: (t.step, t.inside))
        for t in chain:
            t.reward = -charges[id(t)]
        for i, step in enumerate(steps):
            if step["rewards"] is not None:
                earned = list(enumerate(step["rewards"]))
            else:
                earned = [(len(step["response_ids"]) - 1, step["reward"] or 0.0)]
            for j, reward in earned:
                until = [t for t in chain if (t.step, t.inside) <= (i, j)]
                if until:
                    until[-1].reward += reward
        following, gain = 0.0, 0.0
        factor = c["gamma"] * (c["gae_lambda"] if c["estimator"] == "gae" else 1.0)
        for t in reversed(chain):
            if c["estimator"] == "gae":
                gain = t.reward + c["gamma"] * following - t.value + factor * gain
                t.target = gain + t.value
            else:
                gain = t.reward + factor * gain
            following, t.advantage = t.value, gain
    mean, variance = moments([t.advantage for t in tokens], bessel=True)
    for t in tokens:
        t.advantage = (t.advantage - mean) / math.sqrt(variance + 1e-8)


def moments(values, *, bessel):
    if not values or max(values) == min(values):
        return (values[0] if values else 0.0), 1.0
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values) / (len(values) - bessel)
