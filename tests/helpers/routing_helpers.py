"""Tiny mixtures of experts, and what they choose, seen where the experts are given it."""

import zlib
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import rollout_io
from schemas.columns import arrow_schema, routing_type
from schemas.metadata import DatasetMetadata
from schemas.ragged import Ragged, offsets_of
from tests.helpers.trainer_helpers import VOCAB
from trainer.models.router_replay import Routes

ROUTING = "rollout_expert_indices"
NUM_LAYERS, NUM_EXPERTS, TOPK = 3, 8, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOPK,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": NUM_EXPERTS, "norm_topk_prob": True, "head_dim": 8},
    "qwen3_moe, not normalised": {
        "num_experts": NUM_EXPERTS,
        "norm_topk_prob": False,
        "head_dim": 8,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {"num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": NUM_EXPERTS, "intermediate_size": 16},
    "mixtral": {"num_local_experts": NUM_EXPERTS, "intermediate_size": 16},
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
}


def tiny_moe(family="qwen3_moe", seed=0, **settings):
    """Three layers of eight experts, two a token; DeepSeek's first layer is dense."""
    given = SIZES | FAMILIES[family] | settings
    config = AutoConfig.for_model(family.partition(",")[0], **given)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for router in routers(model).values():
        nn.init.normal_(router.weight, std=0.3)
        if hasattr(router, "e_score_correction_bias"):
            nn.init.normal_(router.e_score_correction_bias, std=0.1)
    return model


def routers(model):
    """The router of each layer that has one."""
    blocks = {number: layer.mlp for number, layer in enumerate(model.model.layers)}
    return {number: block.gate for number, block in blocks.items() if hasattr(block, "gate")}


@contextmanager
def experts_used(model):
    """What the experts of each layer are told to do: [N, topk], of the last forward."""
    found = {}
    handles = []
    for number in routers(model):

        def take(_, args, number=number):
            found[number] = args[1].clone()

        handles.append(model.model.layers[number].mlp.experts.register_forward_pre_hook(take))
    yield found
    for handle in handles:
        handle.remove()


@torch.no_grad()
def choice_of(model, tokens):
    """[N, layers, topk] int16 experts of a plain forward of one row; 0 in dense layers."""
    with experts_used(model) as found:
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    nothing = torch.zeros(len(tokens), TOPK, dtype=torch.int64)
    layers = [found.get(number, nothing) for number in range(NUM_LAYERS)]
    return torch.stack(layers, 1).to(torch.int16)


def routes_of(parts):
    """Routes of rows, each [tokens, layers, topk] of its leading tokens."""
    values = np.concatenate([part.numpy().reshape(len(part), NUM_LAYERS * TOPK) for part in parts])
    offsets = offsets_of(np.array([len(part) for part in parts], dtype=np.int64))
    return Routes(Ragged(values, offsets, np.ones(len(parts), np.bool_)), NUM_LAYERS, TOPK)


def own_routes(model, rows):
    """What a model chooses for all tokens but the last of each row, as engines record it."""
    return routes_of([choice_of(model, prompt + response)[:-1] for prompt, response, _ in rows])


def random_routes(rng, num_tokens):
    """[tokens, layers, topk] different experts."""
    order = rng.random((num_tokens, NUM_LAYERS, NUM_EXPERTS)).argsort(-1)
    return torch.from_numpy(order[..., :TOPK].astype(np.int16))


def steady_routes(tokens, salt=0):
    """Routes as nested lists; those of a token depend on what stands before it alone."""
    found = []
    for end in range(1, len(tokens) + 1):
        rng = np.random.default_rng(zlib.crc32(bytes([salt, *tokens[:end]])))
        found += random_routes(rng, 1).tolist()
    return found


def write_routed(path, rows, logprobs_mode=None):
    """A dataset whose rows have `rollout_expert_indices`, or None there."""
    names = tuple({name for row in rows for name in row} - {ROUTING})
    layers, topk = next(np.shape(row[ROUTING])[1:] for row in rows if row[ROUTING])
    schema = arrow_schema(names).append(pa.field(ROUTING, routing_type(layers, topk)))
    metadata = DatasetMetadata(logprobs_mode=logprobs_mode)
    with rollout_io.RolloutWriter(path, metadata=metadata) as writer:
        writer.write(pa.Table.from_pylist(list(rows), schema=schema))
    return str(path)
