"""Read pictures of a dataset, as the image processor of a model prepares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from PIL import Image
from torch import Tensor
from transformers import AutoConfig

from rollout_io.dataset.blobs import RULE, Blobs, fault_of
from rollout_io.retokenize.processor import load_image_processor, open_picture
from schemas.errors import InputError, InvariantError

MOST_PREPARED = 64
"""Prepared pictures kept in memory: one is 5 to 30 MB."""


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
        self._prepare = load_image_processor(model)
        self._stores = stores
        self._prepared = lru_cache(maxsize=MOST_PREPARED)(self._read)

    def load(self, names: Sequence[str]) -> list[Mapping[str, Tensor]]:
        """Return what the image processor makes of each picture: tensors by name."""
        return [self._prepared(name) for name in names]

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

    def prepare(self, picture: Image.Image, where: str) -> Mapping[str, Tensor]:
        """Return what the image processor makes of a picture; see the function `prepare`."""
        return prepare(self._prepare, picture, where)

    def _read(self, name: str) -> Mapping[str, Tensor]:
        return self.prepare(self.open(name), name)


def prepare(
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
