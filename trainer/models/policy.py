"""The policy: an unmodified Transformers causal LM, evaluated at the targets of a forest."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from rollout_io.dataset.opening import read_input
from schemas.errors import ConfigError, InputError
from trainer.batches.forest import Forest, RowLimit
from trainer.batches.sampling_support import TeacherSets
from trainer.config.train_config import MOST_CONFIG_BYTES, check_model_directory
from trainer.models.attention import fix_frequencies, forest_mask, use_chain_attention
from trainer.models.layers import layer_classes
from trainer.models.logprob_head import set_logprobs, target_logprobs, teacher_divergence
from trainer.models.pictures import picture_inputs
from trainer.models.router_replay import make_replayable, replayed
from trainer.models.self_check import check_policy, probe
from trainer.models.tree_attention import SYMBOLIC_SIZES

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
SCALING = {"yarn", "longrope"}
"""Kinds of RoPE scaling that extend a stated number of positions by a factor."""
MOST_POSITIONS = 2**31 - 1
ALIGNMENT = 64
"""Alignment of tensors that torch allocates on a CPU, bytes."""
PLAIN_ATTENTION = "train a model whose attention scores have no caps, sinks or biases"


class Policy(nn.Module):
    """A causal LM that computes the log-probability and entropy of each target of a forest.

    Everything, including the head, runs inside `forward`, so that wrappers of `forward` that gather
    parameters or reduce gradients cover every use of the parameters. The model stays in evaluation
    mode, because the sampler had no dropout either.

    Args:
        model: A causal LM whose layers use full or sliding-window attention.
        logprob_chunk_tokens: Number of targets whose logits are in memory at once.
        entropy_gradient: Whether the entropy has a gradient.
    """

    def __init__(
        self, model: PreTrainedModel, *, logprob_chunk_tokens: int, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.entropy_gradient = entropy_gradient
        config = model.config.get_text_config()
        self.logit_scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.logit_scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None) or None
        use_chain_attention(model)
        make_replayable(model)
        fix_frequencies(model)
        self.eval()

    @property
    def _no_split_modules(self) -> Any:
        """Classes of layers that FSDP shards one by one; Accelerate reads this attribute."""
        return layer_classes(self.model)

    def forward(self, forest: Forest, temperature: Tensor) -> Any:
        """Compute log-probabilities and entropies in one forward pass.

        Args:
            forest: N tokens, M targets, on the model's device.
            temperature: [M] float32 > 0; logits are divided by it.

        Returns:
            `logprobs` [M] float32 nats, with gradient; `entropy` [M] float32 nats of the
            distribution from which each target was drawn, without gradient unless
            `entropy_gradient`. Both are normalised over `forest.sets`. With `forest.teacher`, also
            the divergence from the teacher ([M] float32 nats, with gradient), and no sets apply.
        """
        with replayed(self.model, forest.routes):
            hidden = hidden_before_targets(self.model, forest)
        inputs, sets = (hidden, forest.target_token, temperature), forest.sets
        if forest.teacher is not None:
            return self._with_divergence(forest.teacher, self._chunks(*inputs))
        if sets is None:
            return self._outputs(self._head, self._chunks(*inputs))
        chunks = self._chunks(*(i[sets.free] for i in inputs)) if len(sets.free) else []
        limited = self._chunks(*(i[sets.limited] for i in inputs))
        sizes = sets.lengths.tensor_split(len(limited))
        split: Any = sets.ids.split
        ids = split([int(part.sum()) for part in sizes])
        chunks += [(*c, *s) for c, s in zip(limited, zip(ids, sizes, strict=True), strict=True)]
        logprobs, entropy = self._outputs(self._head, chunks)
        return logprobs[sets.position], entropy[sets.position]

    def _with_divergence(self, teacher: TeacherSets, chunks: list[tuple[Tensor, ...]]) -> Any:
        """Compute log-probabilities, entropies, and divergences from a teacher."""
        sizes = teacher.lengths.tensor_split(len(chunks))
        split = [int(part.sum()) for part in sizes]
        columns: Any = teacher.ids, teacher.logprobs
        ids, values = (column.split(split) for column in columns)

        def head(hidden: Tensor, token: Tensor, temperature: Tensor, *teacher_sets: Tensor) -> Any:
            logits = self.model.get_output_embeddings()(hidden)
            scaling: Any = {"scale": self.logit_scale, "softcap": self.softcap}
            divergence = teacher_divergence(
                logits, temperature, *teacher_sets, **scaling, is_reverse=teacher.is_reverse
            )
            entropies = self.entropy_gradient
            return *target_logprobs(
                logits, token, temperature, **scaling, entropy_gradient=entropies
            ), divergence

        parts = zip(chunks, ids, values, sizes, strict=True)
        return self._outputs(head, [(*chunk, *teacher_sets) for chunk, *teacher_sets in parts])

    def _chunks(self, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
        num_chunks = max(1, math.ceil(len(inputs[0]) / self.logprob_chunk_tokens))
        return list(zip(*(i.tensor_split(num_chunks) for i in inputs), strict=True))

    def _outputs(self, head: Any, chunks: list[tuple[Tensor, ...]]) -> Any:
        again: Any = partial(checkpoint, head, use_reentrant=False)
        # The backward pass starts with the last chunk, whose logits need not be recomputed.
        recomputed = chunks[:-1] if torch.is_grad_enabled() else []
        parts = [again(*chunk) for chunk in recomputed]
        parts += [head(*chunk) for chunk in chunks[len(recomputed) :]]
        return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))

    def _head(
        self, hidden: Tensor, token: Tensor, temperature: Tensor, *sets: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.model.get_output_embeddings()(hidden)
        function: Any = set_logprobs if sets else target_logprobs
        outputs: tuple[Tensor, Tensor] = function(
            logits,
            token,
            temperature,
            *sets,
            scale=self.logit_scale,
            softcap=self.softcap,
            entropy_gradient=self.entropy_gradient,
        )
        return outputs


def save_weights(model: PreTrainedModel, path: Path, weights: dict[str, Tensor]) -> None:
    """Write a model directory; `generation_config.json` is left to be copied from the original."""
    # Transformers below 5.23 refuses to write generation settings that published models have.
    vars(model)["can_generate"] = lambda: False
    try:
        model.save_pretrained(path, state_dict=weights)
    finally:
        del vars(model)["can_generate"]


def use_float32_head(model: Any) -> None:
    """Compute the logits in float32, whatever the precision of the layers.

    Raises:
        ConfigError: The model's head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        finding = f"the head of {model.config.model_type} is a {type(head).__name__}"
        raise ConfigError("float32_head", "model", finding, "a linear layer")

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias: Tensor | None = getattr(head, "bias", None)
            bias = None if bias is None else bias.float()
            return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    layer: Any = head
    layer.forward = forward


def hidden_before_targets(model: Any, forest: Forest) -> Tensor:
    """Compute the last hidden state of each target's parent ([M, hidden_size])."""
    inputs: dict[str, Any] = {"position_ids": forest.position_ids[None]}
    if forest.pictures:
        inputs |= picture_inputs(model, forest, forest.pictures)
    with forest_mask(model.config, forest) as mask, SYMBOLIC_SIZES():
        output = model.base_model(
            input_ids=forest.token_ids[None], attention_mask=mask, use_cache=False, **inputs
        )
    # The gradient of an embedding sums the targets that share a parent in a fixed order. With
    # several threads, the gradient of plain indexing sums them in any order: not reproducible.
    return nn.functional.embedding(forest.target_parent, output.last_hidden_state[0])


def load_policy(
    path: str,
    *,
    logprob_chunk_tokens: int,
    entropy_gradient: bool = False,
    trees: bool = False,
    checks: bool = True,
) -> Policy:
    """Load a model directory as a policy with float32 weights, and check it on a few tokens.

    `trees` states whether the policy will forward branching trees. `checks=False` skips the
    comparison with the model's own forward pass; use it for other weights of a model that has
    already been checked. In a `FakeTensorMode`, the model is built from its configuration, and only
    the shapes of its weights are used. See `Policy` for the other arguments.

    Raises:
        InputError: `path` is not a model directory; Transformers cannot load the model without
            remote code; its layers ignore a forest's attention mask; or the policy does not
            reproduce the model's log-probabilities.
    """
    check_model_directory(path)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(path, **_LOCAL)
        _check_layers(config, path)
        how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        if has_shapes_only():
            with no_init_weights():  # some draw values, which there are none of
                loaded: Any = auto_class(config).from_config(config, **how), {}
        else:
            loaded = auto_class(config).from_pretrained(
                path, **_LOCAL, **how, output_loading_info=True
            )
    except InputError:
        raise
    except Exception as error:  # Transformers does not wrap the errors of a configuration
        if "scaled_dot_product_attention" in str(error):
            kind = AutoConfig.from_pretrained(path, **_LOCAL).model_type
            finding = f"Transformers cannot run {kind} with scaled_dot_product_attention"
            raise InputError("model_layers", path, finding, hint=PLAIN_ATTENTION) from error
        if code := _code_of(path):
            finding = f"Transformers has no model of this type, and the directory's code is not run: {code}"
            hint = "use a model that Transformers supports without trust_remote_code"
            raise InputError("model_load", path, finding, hint=hint) from None
        finding = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finding = f"cannot be loaded as a causal LM by Transformers: {finding}"
        raise InputError("model_load", path, finding) from error
    model, loading = loaded
    if loading:
        _check_weights(loading, path)
    policy = Policy(
        model, logprob_chunk_tokens=logprob_chunk_tokens, entropy_gradient=entropy_gradient
    )
    if checks and loading:
        check_policy(policy, path, trees=trees)
        freeze_unused(policy)
    return policy


def _code_of(path: str) -> str:
    """Return the classes of Python code that the directory of a model asks for (`auto_map`)."""
    config: Any = json.loads(read_input(Path(path) / "config.json", MOST_CONFIG_BYTES))
    named = config.get("auto_map")
    values = named.values() if isinstance(named, dict) else [named] if named else []
    return ", ".join(sorted({str(value) for value in values}))


def auto_class(config: Any) -> Any:
    """Return the class of Transformers that loads a model, with its encoder of pictures if possible."""
    kind = config.model_type
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def has_shapes_only() -> bool:
    """True in a `FakeTensorMode`, where tensors have shapes but no values."""
    return detect_fake_mode() is not None


def refuse_quantised(path: str) -> None:
    """Check that a model to train has floating-point weights.

    Raises:
        InputError: `model_quantised`: the model directory has quantised weights.
    """
    check_model_directory(path)
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        configs = [config, *config.values()]
        quantisations = [one.get("quantization_config") for one in configs if isinstance(one, dict)]
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # `load_policy` explains what is wrong with the file
    quantised = next((one for one in quantisations if one), None)
    if quantised is not None:
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else None
        finding = f"the weights are quantised (quantization_config{f', {kind}' if kind else ''})"
        hint = (
            "train the model that was quantised, or one that `model.dequantize()` of Transformers and"
            " `save_pretrained` have written"
        )
        raise InputError("model_quantised", path, finding, "weights in floating point", hint)


def align(model: nn.Module) -> None:
    """Move trained parameters to memory aligned to 64 bytes, like tensors that torch allocates.

    Loaded weights keep their offset in the file, which depends on the length of its header, and the
    last bits of a matrix-vector product depend on the alignment. A run resumed from a checkpoint,
    whose header has a different length, would otherwise not repeat its updates exactly.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def _check_weights(loading: Any, path: str) -> None:
    """Check that the files and the configuration agree on all weights and their shapes."""
    for breach, text in {
        "missing_keys": "weights are missing: {}",
        "mismatched_keys": "weights do not have the shape that config.json describes: {}",
        "unexpected_keys": "weights are not in the model that config.json describes: {}",
    }.items():
        if names := sorted(str(name) for name in loading[breach]):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            hint = "download config.json and the weights again, both from the same model"
            raise InputError("model_load", path, text.format(names[0]) + more, hint=hint)


def _check_layers(config: Any, path: str) -> None:
    config = config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if unknown:
        raise InputError(
            "model_layers",
            path,
            f"{config.model_type} with {', '.join(sorted(unknown))} layers",
            "full or sliding-window attention in every layer",
            "train a different model: packed rows would affect each other in these layers, whatever"
            " the sequence_layout",
        )


def row_limit(config: Any) -> RowLimit:
    """Return the maximum row length of the model."""
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    hint = "filter out long trajectories, or truncate rows: --set batch.max_row_tokens=N"
    if context and (scaled := _scaled_context(config)) > context:
        hint = (
            f"its {config.rope_parameters['rope_type']} scaling reaches {scaled} positions: to use them,"
            f" set max_position_embeddings to {scaled} in config.json; otherwise {hint}"
        )
    return RowLimit(
        num_tokens=context or MOST_POSITIONS,
        reason="the model's max_position_embeddings" if context else "32-bit positions",
        hint=hint,
    )


def _scaled_context(config: Any) -> int:
    """Return the number of positions that a model's RoPE scaling reaches; 0 if unknown."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") not in SCALING:
        return 0
    original = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    factor = rope.get("factor")
    if not isinstance(original, int) or not isinstance(factor, int | float):
        return 0
    return int(original * factor)


def freeze_unused(policy: nn.Module) -> None:
    """Freeze the parameters that get no gradient from text.

    Examples are the encoders of images and audio, and correction biases of routers. Several
    processes wait for each trained parameter's gradient, and adapters there would learn nothing.
    Experts that are modules of their own are not frozen: they depend on the tokens.
    """
    model: Any = policy.model
    with torch.enable_grad():
        forest = probe(model)
        logprobs, _ = policy(forest, torch.ones(forest.num_targets, device=forest.token_ids.device))
        used = _leaves(logprobs)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in used and not _is_expert(name):
            parameter.requires_grad_(requires_grad=False)


def _leaves(output: Tensor) -> set[int]:
    """Return the ids of the parameters in the graph of a tensor."""
    leaves, seen = set[int](), set[Any]()
    waiting = [output.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves


def _is_expert(name: str) -> bool:
    """True for a parameter of one of several expert modules.

    Example:
        >>> _is_expert("layers.0.mlp.experts.3.up.weight"), _is_expert("layers.0.mlp.experts.up")
        (True, False)
    """
    parts = name.split(".")
    places = [at for at, part in enumerate(parts[:-1]) if "experts" in part]
    return any(parts[at + 1].isdecimal() for at in places)
