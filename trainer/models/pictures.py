"""Pictures that the tokens of a forest show: their features, and what depends on their places.

    H(j) = encoder(picture)[j]     replaces the embedding of the j-th token of each of its ranges

The model's own forward pass inserts the features (`mm_encoder_outputs` of Transformers), into its
deeper layers too, where it has that. The encoder is frozen: it runs once for each distinct picture of
a micro-batch, without gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from trainer.batches.forest import Forest, Pictures

MUTUAL = {"gemma3"}
"""Types of models in which all tokens of a picture see each other."""


def shows_pictures(model: Any) -> bool:
    """True if a model has an encoder of pictures, whose features its forward pass accepts."""
    base = model.base_model
    accepts = "mm_encoder_outputs" in inspect.signature(base.forward).parameters
    has_placeholder = getattr(model.config, "image_token_id", None) is not None
    return accepts and has_placeholder and hasattr(base, "get_image_features")


@contextmanager
def without_encoder(model: Any) -> Iterator[list[nn.Module]]:
    """Take the parts that encode pictures out of a model in this context, and yield them.

    They are frozen. Nothing is taken out of a model that has no encoder of pictures.
    """
    base, decoder = model.base_model, model.get_decoder()
    parts = dict(base.named_children()) if shows_pictures(model) else {}
    parts = {name: part for name, part in parts.items() if decoder not in part.modules()}
    for name in parts:
        setattr(base, name, None)
    try:
        yield list(parts.values())
    finally:
        for name, part in parts.items():
            setattr(base, name, part)


def picture_inputs(model: Any, forest: Forest, pictures: Pictures) -> dict[str, Any]:
    """Return the arguments of a forward pass over a forest that depend on its pictures.

    These are the features of the pictures at their tokens, and positions for rotary embeddings that
    count rows and columns of pictures, if the model has those (M-RoPE).
    """
    loaded = pictures.load()
    inputs: dict[str, Any] = {"mm_encoder_outputs": {"image": encode(model, loaded, pictures)}}
    if hasattr(model.base_model, "get_rope_index"):
        merged = model.config.vision_config.spatial_merge_size
        grids = torch.cat([one["image_grid_thw"] for one in loaded]).to(pictures.node.device)
        grids = grids // grids.new_tensor([1, merged, merged])
        inputs["position_ids"] = grid_positions(forest, pictures, grids)[:, None]
    return inputs


@torch.no_grad()
def encode(model: Any, loaded: Sequence[Mapping[str, Tensor]], pictures: Pictures) -> Any:
    """Encode D pictures, and return the output of the encoder with the features of P tokens.

    Pictures of one shape are encoded together. `pooler_output` and `deepstack_features` of the result
    have P features each, in the order of the tokens.

    Raises:
        ValueError: The encoder gives another number of features than the pictures have tokens.
    """
    outputs = _encoded(model, loaded)
    output = outputs[0]
    output.pooler_output = _gathered([one.pooler_output for one in outputs], pictures)
    if layers := getattr(output, "deepstack_features", None):
        output.deepstack_features = [
            _gathered([one.deepstack_features[layer] for one in outputs], pictures)
            for layer in range(len(layers))
        ]
    return output


@torch.no_grad()
def num_features(model: Any, prepared: Mapping[str, Tensor]) -> int:
    """Count the features that a model's encoder gives for a prepared picture."""
    return len(_flat([one.pooler_output for one in _encoded(model, [prepared])]))


def _encoded(model: Any, loaded: Sequence[Mapping[str, Tensor]]) -> list[Any]:
    function = model.base_model.get_image_features
    names = [name for name in inspect.signature(function).parameters if name in loaded[0]]
    outputs = []
    for _, group in groupby(loaded, lambda one: [_shape(one, name) for name in names]):
        together = list(group)
        inputs = {
            name: torch.cat([one[name] for one in together], _dim(together[0])).to(model.device)
            for name in names
        }
        outputs.append(function(**inputs, return_dict=True))
    return outputs


def _dim(inputs: Mapping[str, Tensor]) -> int:
    """Return the dimension that counts pictures or tiles: some processors put a sample before it."""
    return int(inputs["pixel_values"].ndim == 5)


def _shape(inputs: Mapping[str, Tensor], name: str) -> torch.Size:
    return inputs[name].shape[_dim(inputs) + 1 :]


def _flat(outputs: Sequence[Any]) -> Tensor:
    """Concatenate features to [features, size]; some encoders list those of each picture."""
    parts = [part for output in outputs for part in output]
    return torch.cat([part.flatten(0, -2) for part in parts])


def _gathered(outputs: Sequence[Any], pictures: Pictures) -> Any:
    """Select the features of P tokens, in the container that the model's forward pass expects."""
    features = _flat(outputs)
    if len(features) != int(pictures.ends[-1]):
        raise ValueError(
            f"the encoder gives {len(features)} features for {int(pictures.ends[-1])} tokens"
        )
    selected = features[pictures.feature]
    # One tile for each feature: SmolVLM inserted whole tiles in each row before Transformers 5.23.
    return selected[:, None] if isinstance(outputs[0], Tensor) else (selected,)


def grid_positions(forest: Forest, pictures: Pictures, grids: Tensor) -> Tensor:
    """Compute the position of each token in time, rows and columns (M-RoPE), from its path alone.

        text:     p = depth - sum over pictures above of (number of tokens - max(rows, columns))
        picture:  (p + frame, p + row, p + column), with p of its first token

    Source: Qwen2-VL (arXiv 2409.12191); like `get_rope_index` of Transformers for a single row.

    Args:
        forest: N tokens.
        pictures: Its pictures; the tokens of each stand side by side.
        grids: [D, 3] int64 frames, rows and columns of each picture's features.

    Returns:
        [4, N] int64: depth, and the positions in time, rows and columns.

    Example:
        Three tokens of text, a picture of 2 x 2 features, and one token of text:

        >>> end, node = torch.full((8,), 8), torch.arange(3, 7)
        >>> none = torch.zeros(0, dtype=torch.int64)
        >>> forest = Forest(
        ...     token_ids=end,
        ...     position_ids=torch.arange(8),
        ...     subtree_end=end,
        ...     target_parent=none,
        ...     target_token=none,
        ...     target_slot=none,
        ... )
        >>> picture = Pictures(
        ...     node=node, feature=torch.arange(4), ends=torch.tensor([0, 4]), load=list
        ... )
        >>> grid_positions(forest, picture, torch.tensor([[1, 2, 2]]))[1:].tolist()
        [[0, 1, 2, 3, 3, 3, 3, 5], [0, 1, 2, 3, 3, 4, 4, 5], [0, 1, 2, 3, 4, 3, 4, 5]]
    """
    picture = torch.searchsorted(pictures.ends, pictures.feature, right=True) - 1
    offset = pictures.feature - pictures.ends[picture]
    frames, rows, columns = grids[picture].unbind(1)
    is_last = offset + 1 == frames * rows * columns
    last = pictures.node[is_last]
    saved = (frames * rows * columns - torch.maximum(rows, columns))[is_last]
    # All tokens below the last one of a picture come after it: they are adjacent in the forest.
    change = torch.zeros(forest.num_tokens + 1, dtype=torch.int64, device=saved.device)
    change.index_add_(0, last + 1, saved)
    change.index_add_(0, forest.subtree_end[last], -saved)
    text = forest.position_ids - change.cumsum(0)[:-1]
    positions = text.repeat(3, 1)
    within = offset // (rows * columns), offset // columns % rows, offset % columns
    positions[:, pictures.node] += torch.stack(within) - offset
    return torch.cat([forest.position_ids[None], positions])


def reach_of(config: Any, forest: Forest, pictures: Pictures) -> Tensor | None:
    """Return the end of the tokens that each token sees ([N] int64).

    None if each token sees only tokens up to itself: the tokens of a picture see all of its tokens
    only in some models. A picture in several parts, such as crops, has one range for each part.
    """
    if config.model_type not in MUTUAL:
        return None
    node, feature = pictures.node, pictures.feature
    is_first = torch.ones_like(node, dtype=torch.bool)
    is_first[1:] = (node.diff() != 1) | torch.isin(feature[1:], pictures.ends)
    number = is_first.cumsum(0) - 1
    is_last = torch.ones_like(is_first)
    is_last[:-1] = is_first[1:]
    reach = torch.arange(1, forest.num_tokens + 1, device=node.device)
    reach[node] = node[is_last][number] + 1
    return reach
