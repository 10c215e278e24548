"""Pictures of a batch: which tokens show them, and what the image processor makes of them.

In the token arrays of a batch, -1 - j is the j-th token of its distinct pictures, one after another.
So two tokens are equal if the model sees the same there, and a trie shares a picture like text. Once
a micro-batch is packed, `with_pictures` puts the token ids back. `PictureReader` reads the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import polars as pl
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig

from rollout_io.dataset.blobs import RULE, Blobs, fault_of
from rollout_io.retokenize.processor import load_image_processor, open_picture
from schemas.columns import PICTURES
from schemas.errors import InputError, InvariantError
from schemas.pictures import Spans
from schemas.ragged import IntArray, Ragged, offsets_of, zipped
from trainer.batches.forest import Forest, Pictures

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPictures:
    """D distinct pictures of a batch.

    Attributes:
        names: [D] reference to each picture, as in `pictures`.
        tokens: D rows of the token ids that show a picture; only placeholders stand for features.
        reader: Reads the pictures.
    """

    names: tuple[str, ...]
    tokens: Ragged
    reader: PictureReader


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
    column = rows.struct.field(PICTURES)
    spans, entries = Spans(column.to_arrow()), column.list.len().fill_null(0).to_numpy()
    tokens = zipped(prompts, responses)
    stands = offsets_of(tokens.values == (-1 if placeholder is None else placeholder))
    trained = offsets_of(mask.values)
    first = tokens.offsets[spans.row] + spans.start
    num_features = stands[first + spans.length] - stands[first]
    within = [
        mask.offsets[spans.row]
        + np.clip(at - prompts.lengths[spans.row], 0, mask.lengths[spans.row])
        for at in (spans.start, spans.start + spans.length)
    ]
    trains = spans.row[trained[within[1]] > trained[within[0]]]
    number, num_rows = np.arange(len(rows)), len(rows)
    shown = pl.DataFrame({"row": spans.row, "sha256": spans.sha256, "num_features": num_features})
    shown = shown.group_by("row").agg(shown=pl.struct("sha256", "num_features"))
    facts = pl.DataFrame(
        {
            "row": number,
            "has_pictures": entries > 0,
            "has_unknown": np.bincount(spans.row, minlength=num_rows) < entries,
            "num_outside": np.diff(stands[tokens.offsets])
            - np.bincount(spans.row, num_features, num_rows).astype(np.int64),
            "trains_picture": np.isin(number, trains),
        }
    ).join(shown, on="row", how="left", maintain_order="left")
    return facts.drop("row").to_struct(rows.name).cast(FACTS)


def place_pictures(
    prompts: Ragged, responses: Ragged, spans: pl.Series, reader: PictureReader
) -> tuple[Ragged, Ragged, BatchPictures | None]:
    """Replace the tokens of pictures by their numbers, which are negative.

    Args:
        prompts: Prompt tokens of R rows.
        responses: Response tokens of the same rows.
        spans: [R] the column `pictures`: `sha256`, `start` and `length` in prompt + response.
        reader: Reads the pictures.

    Returns:
        The prompts and responses with numbers, and the pictures; None if no row shows one.
    """
    places = Spans(spans.to_arrow())
    if not len(places.row):
        return prompts, responses, None
    prompt, response = (part.values.astype(np.int32) for part in (prompts, responses))
    numbers: dict[tuple[str, bytes], int] = {}
    names, tokens = list[str](), list[Any]()
    size = 0
    columns = places.row, places.start, places.length
    listed = zip(places.sha256.to_pylist(), *(c.tolist() for c in columns), strict=True)
    for name, row, start, length in listed:
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
        reader=reader,
    )
    return (
        dataclasses.replace(prompts, values=prompt),
        dataclasses.replace(responses, values=response),
        pictures,
    )


def with_pictures(forests: Sequence[Forest], pictures: BatchPictures) -> list[Forest]:
    """Put back the token ids of pictures in micro-batches, and add the pictures that each shows."""
    stands = pictures.tokens.values == pictures.reader.placeholder
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
            load=partial(pictures.reader.load, names),
        ),
    )


MOST_PREPROCESSED = 64
"""Preprocessed pictures kept in memory: one is 5 to 30 MB."""


def placeholder_of(model: str) -> int | None:
    """Return the id of the tokens that pictures replace in a model; None: it shows no pictures."""
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception:  # `load_policy` explains what is wrong with the model
        return None
    return getattr(config, "image_token_id", None)


class PictureReader:
    """Reads the pictures of a dataset for a model.

    Args:
        model: Model directory with the files of an image processor.
        stores: Stores that have the pictures.

    Attributes:
        placeholder: Id of the tokens whose embeddings the features of a picture replace.

    Raises:
        InputError: `processor`: the image processor cannot be loaded.
    """

    def __init__(self, model: str, stores: Sequence[Blobs]) -> None:
        placeholder = placeholder_of(model)
        assert placeholder is not None
        self.placeholder = placeholder
        self._preprocess = load_image_processor(model)
        self._stores = stores
        self._preprocessed = lru_cache(maxsize=MOST_PREPROCESSED)(self._read)

    def load(self, names: Sequence[str]) -> list[Mapping[str, Tensor]]:
        """Return what the image processor makes of each picture: tensors by name."""
        return [self._preprocessed(name) for name in names]

    def open(self, name: str, where: str = "") -> Image.Image:
        """Read a picture, in RGB; `where` is the row that shows it, for messages.

        Raises:
            InvariantError: The file is missing or was changed.
            InputError: `picture_file`: the file cannot be decoded.
        """
        content = next(filter(None, (store.read(name) for store in self._stores)), None)
        if content is None:
            fault = fault_of(name, self._stores) or "the file cannot be read"
            hint = "copy or move DS.blobs together with DS, or convert the log again"
            raise InvariantError(RULE, where or name, fault, "", hint)
        picture: Image.Image = open_picture(content, where or name)
        return picture

    def preprocess(self, picture: Image.Image, where: str) -> Mapping[str, Tensor]:
        """Return what the image processor makes of a picture; see the function `preprocess`."""
        return preprocess(self._preprocess, picture, where)

    def _read(self, name: str) -> Mapping[str, Tensor]:
        return self.preprocess(self.open(name), name)


def preprocess(
    processor: Callable[[Image.Image], Mapping[str, Tensor]], picture: Image.Image, where: str
) -> Mapping[str, Tensor]:
    """Return what an image processor makes of a picture.

    Raises:
        InputError: `picture_file`: it rejects the picture.
    """
    try:
        return processor(picture)
    except Exception as error:  # processors raise whatever their libraries raise
        size = f"{picture.width} x {picture.height} pixels"
        finding = (
            f"the image processor rejects a picture of {size}: {type(error).__name__}: {error}"
        )
        raise InputError("picture_file", where, finding) from error
