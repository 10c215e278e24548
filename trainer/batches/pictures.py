"""Pictures of a batch: which tokens show them, and what the image processor makes of them.

In the token arrays of a batch, -1 - j is the j-th token of its distinct pictures, one after another.
So two tokens are equal if the model sees the same there, and a trie shares a picture like text. Once
a micro-batch is packed, `with_pictures` puts the token ids back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor

from schemas.ragged import IntArray, Ragged, offsets_of, zipped
from trainer.batches.forest import Forest, Pictures

PICTURES = "pictures"
FACTS = pl.Struct(
    {
        "has_pictures": pl.Boolean(),
        "has_unknown": pl.Boolean(),
        "num_outside": pl.Int64(),
        "trains_picture": pl.Boolean(),
        "shown": pl.List(pl.Struct({"sha256": pl.String(), "num_features": pl.Int64()})),
    }
)
"""What `picture_facts` returns for each row."""


class PictureSource(Protocol):
    """Reads pictures for a model.

    Attributes:
        placeholder: Id of the tokens whose embeddings the features of a picture replace.
    """

    placeholder: int

    def load(self, names: Sequence[str]) -> Sequence[Mapping[str, Tensor]]:
        """Return what the image processor makes of each picture: tensors by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPictures:
    """D distinct pictures of a batch.

    Attributes:
        names: [D] SHA-256 of each picture.
        tokens: D rows of the token ids that show a picture; only placeholders stand for features.
        source: Reads the pictures.
    """

    names: tuple[str, ...]
    tokens: Ragged
    source: PictureSource


def picture_facts(rows: pl.Series, placeholder: int | None) -> pl.Series:
    """Return facts about the pictures of rows, as structs of `FACTS`.

    Each row has the pictures that it shows, with their numbers of placeholders; the number of
    placeholders that no picture has; whether a picture or its tokens are unknown (null); and whether
    a token of a picture trains.

    Args:
        rows: Structs of `prompt_token_ids`, `response_ids`, `loss_mask` and `pictures`.
        placeholder: Id of the tokens that stand for features; None: the model has none.
    """
    prompts, responses, mask = (
        Ragged.from_arrow(rows.struct.field(name).to_arrow())
        for name in ("prompt_token_ids", "response_ids", "loss_mask")
    )
    tokens = zipped(prompts, responses)
    stands = offsets_of(tokens.values == (-1 if placeholder is None else placeholder))
    trained = offsets_of(mask.values)
    listed = _listed(rows.struct.field(PICTURES))
    is_unknown = pl.any_horizontal(pl.col("sha256", "start", "length").is_null())
    unknown = listed.filter(is_unknown)["row"].to_numpy()
    listed = listed.filter(~is_unknown)
    row, start, length = (listed[name].to_numpy() for name in ("row", "start", "length"))
    first = tokens.offsets[row] + start
    num_features = stands[first + length] - stands[first]
    within = [
        mask.offsets[row] + np.clip(at - prompts.lengths[row], 0, mask.lengths[row])
        for at in (start, start + length)
    ]
    trains = row[trained[within[1]] > trained[within[0]]]
    numbers = np.arange(len(rows))
    shown = (
        listed.select(
            "row", pl.struct("sha256", num_features=pl.Series(num_features)).alias("shown")
        )
        .group_by("row", maintain_order=True)
        .agg("shown")
    )
    facts = pl.DataFrame(
        {
            "row": pl.Series(numbers, dtype=pl.UInt32),
            "has_pictures": (rows.struct.field(PICTURES).list.len() > 0).fill_null(value=False),
            "has_unknown": np.isin(numbers, unknown),
            "num_outside": np.diff(stands[tokens.offsets])
            - np.bincount(row, num_features, len(rows)).astype(np.int64),
            "trains_picture": np.isin(numbers, trains),
        }
    ).join(shown, on="row", how="left", maintain_order="left")
    return facts.drop("row").to_struct(rows.name).cast(FACTS)


def _listed(spans: pl.Series) -> pl.DataFrame:
    """List the pictures of a column `pictures` with the number of the row of each."""
    listed = spans.to_frame("span").with_row_index("row").explode("span").drop_nulls("span")
    return listed.unnest("span")


def place_pictures(
    prompts: Ragged, responses: Ragged, spans: pl.Series, source: PictureSource
) -> tuple[Ragged, Ragged, BatchPictures | None]:
    """Replace the tokens of pictures by their numbers, which are negative.

    Args:
        prompts: Prompt tokens of R rows.
        responses: Response tokens of the same rows.
        spans: [R] the column `pictures`: `sha256`, `start` and `length` in prompt + response.
        source: Reads the pictures.

    Returns:
        The prompts and responses with numbers, and the pictures; None if no row shows one.
    """
    listed = _listed(spans)
    if listed.is_empty():
        return prompts, responses, None
    prompt, response = (part.values.astype(np.int32) for part in (prompts, responses))
    numbers: dict[tuple[str, bytes], int] = {}
    names, tokens = list[str](), list[Any]()
    size = 0
    columns = ("row", "sha256", "start", "length")
    for row, name, start, length in listed.select(columns).iter_rows():
        border, end = int(prompts.lengths[row]), start + length
        parts = [
            prompt[prompts.offsets[row] :][min(start, border) : min(end, border)],
            response[responses.offsets[row] :][max(start - border, 0) : max(end - border, 0)],
        ]
        ids = np.concatenate(parts)
        key = name, ids.tobytes()
        if key not in numbers:
            numbers[key] = size
            names.append(name)
            tokens.append(ids)
            size += length
        filled = -1 - np.arange(numbers[key], numbers[key] + length, dtype=np.int32)
        parts[0][:], parts[1][:] = filled[: len(parts[0])], filled[len(parts[0]) :]
    lengths = np.array([len(ids) for ids in tokens])
    all_valid = np.ones(len(lengths), np.bool_)
    pictures = BatchPictures(
        names=tuple(names),
        tokens=Ragged(np.concatenate(tokens), offsets_of(lengths), all_valid),
        source=source,
    )
    return (
        dataclasses.replace(prompts, values=prompt),
        dataclasses.replace(responses, values=response),
        pictures,
    )


def with_pictures(forests: Sequence[Forest], pictures: BatchPictures | None) -> list[Forest]:
    """Put back the token ids of pictures in micro-batches, and add the pictures that each shows."""
    if pictures is None:
        return list(forests)
    stands = pictures.tokens.values == pictures.source.placeholder
    # Features of a picture before each of its tokens, and of all pictures before each picture.
    before = offsets_of(stands)
    return [_shown(forest, pictures, stands, before) for forest in forests]


def _shown(forest: Forest, pictures: BatchPictures, stands: Any, before: IntArray) -> Forest:
    token_ids = forest.token_ids.numpy()
    node = np.flatnonzero(token_ids < 0)
    if not len(node):
        return forest
    number = -1 - token_ids[node]
    token_ids = token_ids.copy()
    token_ids[node] = pictures.tokens.values[number]
    node, number = node[stands[number]], number[stands[number]]
    offsets = pictures.tokens.offsets
    shown, local = np.unique(pictures.tokens.row_of(number), return_inverse=True)
    first = before[offsets[shown]]
    ends = offsets_of(before[offsets[shown + 1]] - first)
    feature = before[number] - first[local] + ends[local]
    names = [pictures.names[picture] for picture in shown]
    return dataclasses.replace(
        forest,
        token_ids=torch.from_numpy(token_ids),
        pictures=Pictures(
            node=torch.from_numpy(node),
            feature=torch.from_numpy(feature),
            ends=torch.from_numpy(ends),
            load=partial(pictures.source.load, names),
        ),
    )
