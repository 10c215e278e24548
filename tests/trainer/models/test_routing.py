"""Router replay: recorded experts, with the weights and gradients of the router as it is now."""

import copy
import dataclasses
from types import MethodType

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, sigmoid

from tests.helpers.configs import train_config
from tests.helpers.routing_helpers import (
    FAMILIES,
    TOPK,
    experts_used,
    own_routes,
    random_routes,
    routers,
    routes_of,
    tiny_moe,
)
from tests.helpers.trainer_helpers import gradients, make_batch, relative_difference, run_of
from tests.trainer.algorithms.test_advantages_critic import run_of_critic
from trainer.batch import cut_batch
from trainer.loss import critic_values, policy_logprobs
from trainer.models.critic import Critic
from trainer.models.layers import recompute_layers
from trainer.models.policy import Policy

PACKING = train_config(dataset="d", model="m", out="o").batch
EVERY = pytest.mark.parametrize("family", FAMILIES)


def rows_of(*lengths, seed=1):
    """Rows of three prompt tokens and the given response lengths."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 61, 3).tolist(), rng.integers(0, 61, n).tolist(), [True] * n)
        for n in lengths
    ]


def with_routes(rows, routes, **values):
    return dataclasses.replace(make_batch(rows, **values), routes=routes)


def logprobs_of(policy, batch):
    (mini_batch,) = cut_batch(batch, PACKING)
    (forest,) = mini_batch.forests
    return policy(forest, batch.temperature[forest.target_slot])[0]


def perturbed(model):
    """A copy whose routers choose other experts for many tokens."""
    other = copy.deepcopy(model)
    for router in routers(other).values():
        router.weight.data += 0.3 * torch.randn_like(router.weight)
    return other


@EVERY
def test_routes_of_a_models_own_forward_reproduce_its_logprobs(family):
    model, rows = tiny_moe(family).double(), rows_of(9, 4, 13)
    model.set_experts_implementation("eager")  # grouped_mm knows no float64
    routes = own_routes(model, rows)
    expected = torch.cat([plain_logprobs_in_double(model, row) for row in rows])[:, 0]
    found = logprobs_of(Policy(model, logprob_chunk_tokens=8), with_routes(rows, routes))
    assert (found - expected).abs().max() < 1e-6
    model, routes = tiny_moe(family), own_routes(tiny_moe(family), rows)
    policy = Policy(model, logprob_chunk_tokens=8)
    free, found = (logprobs_of(policy, with_routes(rows, r)) for r in (None, routes))
    assert (found - free).abs().max() < 1e-6  # in float32 too, against the same packed forward


@EVERY
def test_routes_of_a_perturbed_copy_are_taken_layer_by_layer(family):
    model, rows = tiny_moe(family), rows_of(9, 4, 13)
    routes, policy = own_routes(perturbed(model), rows), Policy(model, logprob_chunk_tokens=8)
    expected = torch.from_numpy(routes.tokens.values).view(-1, 3, TOPK).long()
    with experts_used(model) as found, torch.no_grad():
        logprobs_of(policy, with_routes(rows, None))
        free = dict(found)
        logprobs_of(policy, with_routes(rows, routes))
    for layer, experts in found.items():
        assert torch.equal(experts, expected[:, layer])
        assert (experts.sort().values != free[layer].sort().values).any()


def plain_block(block, hidden, *, routes):
    """A mixture of experts as its paper has it, for token after token and expert after expert."""
    gate, kind = block.gate, type(block.gate).__name__
    outputs = []
    for x, route in zip(hidden[0], routes.tolist(), strict=True):
        logits = linear(x, gate.weight)
        scores = logits.sigmoid() if kind == "DeepseekV3TopkRouter" else logits.softmax(-1)
        weights = torch.stack([scores[expert] for expert in route])
        if kind == "MixtralTopKRouter" or getattr(gate, "norm_topk_prob", False):
            weights = weights / weights.sum()
        weights = weights * getattr(gate, "routed_scaling_factor", 1.0)
        total = torch.zeros_like(x)
        for weight, expert in zip(weights, route, strict=True):
            half, up = linear(x, block.experts.gate_up_proj[expert]).chunk(2)
            inner = block.experts.act_fn(half) * up
            total = total + weight * linear(inner, block.experts.down_proj[expert])
        if hasattr(block, "shared_experts"):
            total = total + block.shared_experts(x)
        if hasattr(block, "shared_expert"):
            total = total + sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
        outputs.append(total)
    return torch.stack(outputs)[None]


def plain_gradient(model, rows, routes):
    """Of the sum of the log-probabilities of all responses: a row at a time, blocks as loops."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    for row, route in zip(rows, routes, strict=True):
        for number in routers(model):
            block = model.model.layers[number].mlp

            def forward(self, hidden, number=number):
                return plain_block(self, hidden, routes=route[:, number])  # noqa: B023

            block.forward = MethodType(forward, block)
        plain_logprobs_in_double(model, row).sum().backward()
    return gradients(model)


def plain_logprobs_in_double(model, row):
    prompt, response, _ = row
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@EVERY
def test_gradients_are_those_of_plain_loops_over_the_recorded_experts(family, *, checkpointing):
    rng, rows, model = np.random.default_rng(0), rows_of(5, 3, 4), tiny_moe(family).double()
    model.set_experts_implementation("eager")  # grouped_mm knows no float64
    routes = [random_routes(rng, len(prompt + response)) for prompt, response, _ in rows]
    expected = plain_gradient(model, rows, routes)
    policy = Policy(model, logprob_chunk_tokens=8)
    if checkpointing:
        recompute_layers(policy.model)
    logprobs_of(policy, with_routes(rows, routes_of(routes))).sum().backward()
    found = gradients(model)
    assert relative_difference(found, expected) < 1e-6
    model.zero_grad()
    logprobs_of(policy, with_routes(rows, None)).sum().backward()
    assert relative_difference(gradients(model), expected) > 1e-2


@EVERY
def test_tokens_without_a_route_route_freely(family):
    model, rows = tiny_moe(family), rows_of(9, 4, 6)
    whole = own_routes(perturbed(model), rows)
    parts = [torch.from_numpy(whole.tokens.row(i)).view(-1, 3, TOPK) for i in range(len(rows))]
    lengths = [5, 0, len(parts[2])]
    batch = with_routes(rows, routes_of([p[:n] for p, n in zip(parts, lengths, strict=True)]))
    with experts_used(model) as found, torch.no_grad():
        partly = logprobs_of(Policy(model, logprob_chunk_tokens=8), batch)
        experts = dict(found)
        free = logprobs_of(Policy(model, logprob_chunk_tokens=8), with_routes(rows, None))
        own = dict(found)
    starts = np.cumsum([0, *map(len, parts)])
    for start, length, part in zip(starts, lengths, parts, strict=False):
        for layer in experts:
            assert torch.equal(experts[layer][start : start + length], part[:length, layer].long())
    second = slice(starts[1], starts[2])  # this row has no route: it is as it is without replay
    assert all(torch.equal(experts[layer][second], own[layer][second]) for layer in experts)
    row = batch.responses.row_of(np.arange(len(partly)))
    assert (partly - free)[row == 1].abs().max() < 1e-6
    assert (partly - free)[row != 1].abs().max() > 1e-3


def test_old_new_and_reference_passes_take_the_routes_and_the_critic_does_not():
    model, rows = tiny_moe(), rows_of(9, 4)
    routes = own_routes(perturbed(model), rows)
    batch, free = with_routes(rows, routes), with_routes(rows, None)
    policy, reference = (
        Policy(model, logprob_chunk_tokens=8),
        Policy(tiny_moe(seed=3), logprob_chunk_tokens=8),
    )
    learner = run_of(policy, reference=reference)
    forests, free_forests = (cut_batch(b, PACKING)[0].forests for b in (batch, free))
    for model_of_pass in (None, reference):
        replayed = policy_logprobs(learner, batch, forests, model_of_pass)
        assert (
            replayed - policy_logprobs(learner, free, free_forests, model_of_pass)
        ).abs().max() > 1e-3
    critic = run_of_critic(Critic(Policy(tiny_moe(), logprob_chunk_tokens=8).model))
    torch.nn.init.normal_(critic.critic.value_head.weight)
    values = [critic_values(critic, b, f) for b, f in ((batch, forests), (free, free_forests))]
    assert torch.equal(*values)
