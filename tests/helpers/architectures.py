"""A tiny model of every causal LM that Transformers knows, made from its default configuration."""

import re
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from schemas.errors import RolloutError
from tests.helpers.trainer_helpers import (
    VOCAB,
    forests_of,
    gradients,
    make_batch,
    plain_logprobs,
    relative_difference,
)
from tests.trainer.models.test_tree_attention import forking_rows, only_forest
from trainer.models.attention import CHAIN_ATTENTION, ForestMask, fix_frequencies, mask_of_layers
from trainer.models.policy import Policy, load_policy

WINDOW = 5

SIZES = {
    VOCAB: "vocab_size vocab_size_per_layer_input entity_vocab_size",
    64: "n_positions max_position_embeddings n_ctx seq_length max_seq_len context_length",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size d_ff"
    " intermediate_size_mlp shared_intermediate_size block_ff_dim dense_intermediate_size",
    32: "hidden_size d_model n_embd embedding_size hidden_dim encoder_hidden_size dim word_embed_dim"
    " attention_hidden_size d_embed embed_dim emb_dim kv_dim hidden_size_per_layer_input"
    " rnn_hidden_size lru_width num_mem_blocks",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"
    " moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank o_lora_rank index_head_dim"
    " linear_key_head_dim linear_value_head_dim mamba_d_state mamba_d_head",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels d_kv swa_head_dim"
    " attention_head_dim global_head_dim swa_v_head_dim",
    WINDOW: "sliding_window sliding_window_size attention_window window_size attention_chunk_size",
    4: "num_hidden_layers n_layer num_layers decoder_layers encoder_layers n_layers n_head"
    " num_attention_heads num_heads decoder_attention_heads encoder_attention_heads n_heads"
    " num_experts num_local_experts n_routed_experts moe_num_experts num_encoder_layers"
    " num_decoder_layers swa_num_attention_heads index_n_heads zero_expert_num ffn_num_experts",
    2: "num_key_value_heads num_experts_per_tok moe_k moe_topk num_experts_per_token index_topk"
    " top_k_experts topk n_kv_heads num_kv_heads swa_num_key_value_heads"
    " linear_num_key_heads linear_num_value_heads num_global_key_value_heads"
    " max_window_layers",
    1: "n_group topk_group num_nextn_predict_layers n_shared_experts moe_num_shared_experts"
    " first_k_dense_replace first_k_dense num_shared_experts",
}  # fmt: skip
TINY = {name: size for size, names in SIZES.items() for name in names.split()}
DERIVED = {
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "block_types",
    "transformers_version",
}
"""What a configuration derives from the number of layers."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
HEAD = {"head_dim": 8}
SPECIAL = {
    "bamba": MAMBA,
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": MAMBA,
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": HEAD,
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "ministral": HEAD,
    "nemotron": HEAD | {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": MAMBA | {"layer_types": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a configuration needs beyond."""


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [4.0, 8.0, 16.0, 32.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS = {
    "falcon, alibi": {"alibi": True},
    "gpt_bigcode, multi_query false": {"multi_query": False},
    "hunyuan_v1_dense, dynamic NTK by alpha": {"rope_parameters": DYNAMIC | {"alpha": 50.0}},
    "internlm3, dynamic NTK": {"rope_parameters": DYNAMIC},
    "llama, dynamic NTK": {"rope_parameters": DYNAMIC},
    "llama, LongRoPE": {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32}},
    "minicpm3, LongRoPE": {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32}},
    "phi3, LongRoPE": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    "phimoe, LongRoPE": {
        "rope_parameters": LONGROPE
        | {"original_max_position_embeddings": 32, "short_mscale": 1.1, "long_mscale": 1.3}
    },
    "qwen2, no windows": {"use_sliding_window": False},
    "qwen3_next, full attention only": {"layer_types": ["full_attention"] * 4},
}
"""What a configuration of the same architecture can turn on or off."""


def tiny_config(kind):
    """The default configuration of `kind` with every size made small, and its windows on."""
    make = CONFIG_MAPPING[kind.partition(",")[0]]
    given = SPECIAL.get(kind.partition(",")[0], {}) | VARIANTS.get(kind, {})
    config = make(**(shrunk(make()) | given))
    for each in configs(config):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if isinstance(getattr(each, name, None), int):
                setattr(each, name, 0)
    return config


def configs(config):
    """It and those inside it."""
    inside = [v for v in vars(config).values() if isinstance(v, PreTrainedConfig)]
    return [config, *(found for each in inside for found in configs(each))]


def shrunk(config):
    """Arguments that make a small one of its kind."""
    found = {}
    for name, value in vars(config).items():
        if name == "use_sliding_window":
            found[name] = True
        if name in DERIVED or name.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, PreTrainedConfig):
            found[name] = shrunk(value)
        elif name == "sliding_window":
            found[name] = WINDOW
        elif name in TINY and isinstance(value, int) and value > 0:
            found[name] = TINY[name]
    heads = [vars(config).get(f"num_{name}_heads") for name in ("attention", "key_value")]
    if heads[0] == heads[1] is not None:
        found["num_key_value_heads"] = TINY["num_attention_heads"]
    return found


def tiny_model(kind):
    """A model whose weights make attention matter: its scores vary from token to token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation="eager").eval()
    for parameter in model.parameters():
        with torch.no_grad():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of one architecture.

    Attributes:
        kind: Its name, with what is special about the variant.
        layouts: Those of `sequence_layout` that train; none: refused.
        reason: Of the refusal, of trees or of all.
        difference: Most nats from an eager forward of each row, in any of the layouts.
        gradient: Most relative difference of the gradient, likewise.
        windowed: Whether a layer has a sliding window.
        policy: What was loaded.
    """

    kind: str
    layouts: tuple[str, ...] = ()
    reason: str = ""
    difference: float = 0.0
    gradient: float = 0.0
    windowed: bool = False
    policy: Policy | None = None

    @property
    def text(self):
        """For the table of the docs: no figures, which depend on the machine."""
        layouts = ", ".join(self.layouts) or "refused"
        reason = re.sub(r"differ by \S+ nats", "differ", self.reason.partition(" Please ")[0])
        return f"{layouts} | {reason}".rstrip()


def verdict(kind, folder):
    """Load a tiny model as the trainer does and compare it; None: none can be made of defaults.

    Args:
        kind: One of `KINDS`.
        folder: An empty directory.
    """
    try:
        tiny_config(kind).save_pretrained(folder)
        tiny_model(kind).save_pretrained(folder)
        plain = _plain(folder)
    except Exception:
        refused = _load(folder, trees=False) if (folder / "config.json").is_file() else None
        known = isinstance(refused, RolloutError) and refused.rule == "model_layers"
        return Verdict(kind=kind, reason=refused.got) if known else None
    found, layouts, reason = _load(folder, trees=True), ["step", "merge", "tree"], ""
    if isinstance(found, RolloutError):
        reason, found, layouts = found.got, _load(folder, trees=False), layouts[:2]
    if isinstance(found, RolloutError):
        return Verdict(kind=kind, reason=found.got)
    with windows_seen() as windows:
        pairs = [_differences(found, plain, layout) for layout in layouts]
    difference, gradient = (max(values) for values in zip(*pairs, strict=True))
    return Verdict(
        kind=kind,
        layouts=tuple(layouts),
        reason=reason,
        difference=difference,
        gradient=gradient,
        windowed=any(windows),
        policy=found,
    )


def _load(folder, *, trees):
    try:
        return load_policy(str(folder), logprob_chunk_tokens=64, trees=trees)
    except RolloutError as error:
        return error


def _plain(folder):
    """The model, to forward rows one by one; its rotary frequencies are fixed as a policy's are."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    fix_frequencies(model)
    return model


def _differences(policy, plain, layout):
    """Nats, and the relative one of the gradient, from an eager forward of each row."""
    rows = merged_rows() if layout == "merge" else forking_rows()
    (forest,) = [only_forest(rows)] if layout == "tree" else forests_of(make_batch(rows))
    by_target, _ = policy(forest, torch.ones(forest.num_targets))
    kept = torch.tensor([trains for _, _, mask in rows for trains in mask])
    found = torch.zeros(len(kept)).index_put((forest.target_slot,), by_target)[kept]
    expected = plain_logprobs(plain, rows)[kept]
    weights = torch.linspace(-1, 1, len(found))
    for model, logprobs in ((policy, found), (plain, expected)):
        model.zero_grad()
        (logprobs * weights).sum().backward()
    gradient = relative_difference(gradients(policy), gradients(plain))
    return float((found - expected).detach().abs().max()), gradient


def merged_rows():
    """Rows of several turns, whose observations do not train."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, 60).tolist()
    masks = [n % 7 > 2 for n in range(40)]
    return [(tokens[:3], tokens[3:30], masks[:27]), (tokens[30:37], tokens[37:50], masks[:13])]


@contextmanager
def windows_seen(change=0):
    """The windows of layers' masks, made longer by `change` tokens."""
    masks, seen = AttentionMaskInterface()._global_mapping, list[int | None]()

    def mask(**given):
        found = mask_of_layers(**given)
        if not isinstance(found, ForestMask):
            return found
        seen.append(found.window)
        return replace(found, window=found.window and found.window + change)

    masks[CHAIN_ATTENTION] = mask
    try:
        yield seen
    finally:
        masks[CHAIN_ATTENTION] = mask_of_layers


KINDS = sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])
