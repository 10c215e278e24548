"""Pictures of the prompts of a batch, as a model that samples sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pipelines.generation.engines.base import Picture
from rollout_io.retokenize.processor import open_picture
from schemas.errors import EngineError, InputError, count
from trainer.batches.forest import Forest, Pictures
from trainer.batches.pictures import MOST_PREPARED, PictureReader
from trainer.models.pictures import MUTUAL, picture_inputs, shows_pictures

Prepare = Callable[[bytes], Mapping[str, Tensor]]


def preparing(model: str) -> Prepare:
    """Return a function that prepares the content of a picture for a model, and keeps the last ones.

    Raises:
        InputError: `processor`: the image processor cannot be loaded.
    """
    reader = PictureReader(model, ())

    @lru_cache(maxsize=MOST_PREPARED)
    def prepared(content: bytes) -> Mapping[str, Tensor]:
        where = "a picture of the prompt"
        return reader.prepare(open_picture(content, where), where)

    return prepared


def check_shown(model: Any, prompt: Sequence[int], pictures: Sequence[Picture]) -> None:
    """Check that a model can show pictures, and that every placeholder belongs to one of them.

    Raises:
        EngineError: `engine_pictures`: the model has no encoder of pictures.
        InputError: `picture_tokens`: a placeholder of the prompt is at no picture.
    """
    if not shows_pictures(model):
        if pictures:
            finding = f"the model ({model.config.model_type}) has no encoder of pictures"
            raise EngineError("engine_pictures", "prompt", finding)
        return
    placeholder = model.config.image_token_id
    at_pictures = [
        prompt[one.start : one.start + one.length].count(placeholder) for one in pictures
    ]
    num_outside = prompt.count(placeholder) - sum(at_pictures)
    if num_outside:
        finding = f"{count(num_outside, 'placeholder')} of pictures at no picture"
        raise InputError("picture_tokens", "prompt", finding)


def shown_inputs(
    model: Any,
    requests: Sequence[Any],
    ids: Tensor,
    is_real: Tensor,
    prepare: Prepare,
) -> dict[str, Any]:
    """Return the arguments of the first forward pass of a batch that depend on its pictures.

    They are computed as in training: the prompts are the chains of a forest.

    Args:
        model: The model.
        requests: [B] requests, each with its `pictures`.
        ids: [B, L] ids, padded on the left.
        is_real: [B, L] false at padding.
        prepare: Prepares the content of a picture.

    Returns:
        Features, types of tokens if those of a picture see each other, and `position_ids`
        [4, B, L] if they count rows and columns (M-RoPE). Empty without pictures.
    """
    shown = [(row, one) for row, request in enumerate(requests) for one in request.pictures]
    if not shown:
        return {}
    real, none = is_real.bool(), ids.new_zeros(0)
    lengths = real.sum(1)
    row_ends = lengths.cumsum(0)
    shows = ids[real] == model.config.image_token_id
    contents, firsts, ends = list[bytes](), dict[str, int](), [0]
    nodes, features = list[Tensor](), list[Tensor]()
    for row, picture in shown:
        begin = int(row_ends[row] - lengths[row]) + picture.start
        node = begin + shows[begin : begin + picture.length].nonzero()[:, 0]
        if picture.sha256 not in firsts:
            firsts[picture.sha256] = ends[-1]
            contents.append(picture.content)
            ends.append(ends[-1] + len(node))
        nodes.append(node)
        features.append(firsts[picture.sha256] + torch.arange(len(node), device=ids.device))
    forest = Forest(
        token_ids=ids[real],
        position_ids=(is_real.cumsum(1) - 1)[real],
        subtree_end=row_ends.repeat_interleave(lengths),
        target_parent=none,
        target_token=none,
        target_slot=none,
        pictures=Pictures(
            node=torch.cat(nodes),
            feature=torch.cat(features),
            ends=ids.new_tensor(ends),
            load=lambda: [prepare(content) for content in contents],
        ),
    )
    inputs = picture_inputs(model, forest)
    if "position_ids" in inputs:
        flat = inputs["position_ids"][:, 0]
        inputs["position_ids"] = padded = flat.new_zeros(len(flat), *ids.shape)
        padded[:, real] = flat
    if model.config.model_type in MUTUAL:
        inputs["token_type_ids"] = (ids == model.config.image_token_id).long()
    return inputs


def next_positions(positions: Tensor) -> Tensor:
    """Return the positions of the tokens that follow those of a batch: one more than the largest.

    Args:
        positions: [B, L], or [4, B, L]: depth, and positions in time, rows and columns.

    Returns:
        [B, 1] or [4, B, 1].
    """
    last = positions.amax(-1, keepdim=True)
    if last.ndim == 3:
        last[1:] = last[1:].amax(0)
    return last + 1
