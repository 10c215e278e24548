"""The policy: an unmodified Transformers causal LM that answers for the targets of a forest."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from schemas.errors import RolloutError
from trainer.attention import forest_mask, takes_chains, use_chain_attention
from trainer.forest import Forest, RowLimit
from trainer.head import target_logprobs

KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class Policy(nn.Module):
    """Log-probability and entropy of each target of a forest.

    All of it, head included, runs inside `forward`, so that wrappers that gather parameters or
    reduce gradients around it see every use. The wrapped model stays in evaluation mode: the
    sampler had no dropout either.

    Args:
        model: A causal LM whose layers are full or sliding-window attention.
        logprob_chunk_tokens: Targets whose logits exist at once.
        entropy_gradient: Whether a gradient flows through the entropy.
    """

    def __init__(
        self, model: PreTrainedModel, *, logprob_chunk_tokens: int, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.entropy_gradient = entropy_gradient
        config = model.config
        self.logit_scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.logit_scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None) or None
        use_chain_attention(model)
        self.eval()

    @property
    def _no_split_modules(self) -> Any:
        """What Accelerate asks for: the classes of layers to be sharded one by one."""
        return self.model._no_split_modules

    def forward(self, forest: Forest, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Forward a forest once.

        Args:
            forest: N tokens, M targets, on the model's device.
            temperature: [M] float32 > 0; logits are divided by it.

        Returns:
            `logprobs` [M] float32 nats, with gradient; `entropy` [M] float32 nats of the
            distribution each target was drawn from, without gradient unless `entropy_gradient`.
        """
        hidden = hidden_before_targets(self.model, forest)
        num_chunks = max(1, math.ceil(len(hidden) / self.logprob_chunk_tokens))
        inputs = (hidden, forest.target_token, temperature)
        chunks = list(zip(*(i.tensor_split(num_chunks) for i in inputs), strict=True))
        # The backward pass begins with the last chunk: its logits need not be computed twice.
        parts = [checkpoint(self._head, *chunk, use_reentrant=False) for chunk in chunks[:-1]]
        parts += [self._head(*chunk) for chunk in chunks[-1:]]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _head(self, hidden: Tensor, token: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.get_output_embeddings()(hidden)
        return target_logprobs(
            logits,
            token,
            temperature,
            scale=self.logit_scale,
            softcap=self.softcap,
            entropy_gradient=self.entropy_gradient,
        )

    def checkpoint_layers(self) -> None:
        """Recompute the layers' activations in the backward pass.

        Transformers does so in training mode alone, which would turn dropout on: only the layers'
        own flag is set, not that of the modules inside them.
        """
        recompute: Any = partial(checkpoint, use_reentrant=False)
        for layer in self.model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.gradient_checkpointing = layer.training = True
                layer._gradient_checkpointing_func = recompute


def hidden_before_targets(model: Any, forest: Forest) -> Tensor:
    """[M, hidden_size] last hidden state of each target's parent, from one forward."""
    output = model.base_model(
        input_ids=forest.token_ids[None],
        attention_mask=forest_mask(model.config, forest),
        position_ids=forest.position_ids[None],
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state[0, forest.target_parent]
    return hidden


def load_policy(
    path: str, *, logprob_chunk_tokens: int, entropy_gradient: bool = False, trees: bool = False
) -> Policy:
    """Load a model directory with float32 weights, and try it out.

    Args:
        path: The directory.
        logprob_chunk_tokens: Targets whose logits exist at once.
        entropy_gradient: Whether a gradient flows through the entropy.
        trees: Whether it is to forward trees that branch.

    Raises:
        RolloutError: No model directory; a model that Transformers cannot load without remote
            code; layers that a forest's attention mask does not reach; a model whose
            log-probabilities this policy does not reproduce.
    """
    if not (Path(path) / "config.json").is_file():
        raise _no_model_directory(path)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        _check_layers(AutoConfig.from_pretrained(path, local_files_only=True), path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except RolloutError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise RolloutError(
            "model_load", path, got, "a causal LM that Transformers loads"
        ) from error
    model, loading = loaded
    if loading["missing_keys"]:
        got = f"no weights for {sorted(loading['missing_keys'])[0]}"
        raise RolloutError("model_load", path, got, "every weight of the model")
    policy = Policy(
        model, logprob_chunk_tokens=logprob_chunk_tokens, entropy_gradient=entropy_gradient
    )
    check_policy(policy, path, trees=trees)
    return policy


def _no_model_directory(path: str) -> RolloutError:
    got, hint = "no config.json", None
    if not Path(path).is_dir():
        got = "no such directory"
        name = path if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) else "ORG/NAME"
        hint = f"only local directories work: `hf download {name} --local-dir DIR` makes one"
    expected = "a Hugging Face model directory"
    return RolloutError("model_directory", path, got, expected, hint)


def _check_layers(config: Any, path: str) -> None:
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if unknown:
        raise RolloutError(
            "model_layers",
            path,
            f"{config.model_type} with {', '.join(sorted(unknown))} layers",
            "full or sliding-window attention in every layer",
            "packed rows would leak into each other through such layers, in any sequence_layout",
        )


def row_limit(config: Any, tokens_per_micro_batch: int) -> RowLimit:
    """The longest row, given the token budget and what the model can do."""
    limits = [
        RowLimit(
            num_tokens=tokens_per_micro_batch,
            reason="tokens_per_micro_batch",
            hint="--set tokens_per_micro_batch=N with N at least the row's length",
        )
    ]
    layers = getattr(config, "layer_types", None)
    if not takes_chains(config) and (layers is None or "sliding_attention" in layers):
        window = getattr(config, "sliding_window", None)
        if window:
            hint = "use a model with full attention, or filter long trajectories out"
            reason = "the model's sliding_window; longer rows are not supported"
            limits.append(RowLimit(num_tokens=window, reason=reason, hint=hint))
    context = getattr(config, "max_position_embeddings", None)
    if context:
        hint = "filter long trajectories out"
        reason = "the model's max_position_embeddings"
        limits.append(RowLimit(num_tokens=context, reason=reason, hint=hint))
    return min(limits, key=lambda limit: limit.num_tokens)


CHAINS = (
    torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]),
    torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]),
    torch.tensor([4, 4, 4, 4, 8, 8, 8, 8]),
)
"""Positions of two rows, and depth and subtree_end of the eight tokens."""
FORK = (
    torch.tensor([[0, 1, 2, 3, 4], [0, 1, 5, 6, 7]]),
    torch.tensor([0, 1, 2, 3, 4, 2, 3, 4]),
    torch.tensor([8, 8, 5, 5, 5, 8, 8, 8]),
)


def check_policy(policy: Policy, path: str, *, trees: bool = False) -> None:
    """Compare two packed rows with the model's own forward of each.

    Eight tokens tell whether the head's logits are the model's and whether rows leak into each
    other, for architectures nobody thought of when this was written.

    Raises:
        RolloutError: The log-probabilities differ.
    """
    shapes = {"packed": CHAINS, "branching": FORK} if trees else {"packed": CHAINS}
    for name, shape in shapes.items():
        try:
            difference = _difference(policy, *shape)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            got = f"{type(error).__name__} from its forward: {error}"
            expected = "a decoder that takes a 4-D mask"
            raise RolloutError("model_layers", path, got, expected) from error
        if not difference < 1e-3:
            raise RolloutError(
                "model_layers",
                path,
                f"log-probabilities that differ by {difference:.2g} between {name} and plain forward",
                "a decoder with full or sliding-window attention and a linear head",
                "--set sequence_layout=merge packs chains alone" if shape is FORK else None,
            )


@torch.no_grad()
def _difference(policy: Policy, rows: Tensor, depth: Tensor, subtree_end: Tensor) -> float:
    """The largest one in a log-probability."""
    device = next(policy.parameters()).device
    rows, depth, subtree_end = (tensor.to(device) for tensor in (rows, depth, subtree_end))
    tokens = torch.arange(1, 9, device=device) * 7919 % policy.model.config.vocab_size
    parent, target = rows[:, :-1].flatten(), tokens[rows[:, 1:]].flatten()
    forest = Forest(
        token_ids=tokens,
        position_ids=depth,
        subtree_end=subtree_end,
        target_parent=parent,
        target_token=target,
        target_slot=parent,
    )
    logprobs, _ = policy(forest, torch.ones(len(parent), device=device))
    logits = policy.model(input_ids=tokens[rows], use_cache=False).logits[:, :-1].float()
    expected = logits.log_softmax(-1).flatten(0, 1).gather(1, target[:, None])[:, 0]
    return float((logprobs - expected).abs().max())
