"""Read pictures of a dataset, as the image processor of a model prepares them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor

from rollout_io.dataset.blobs import RULE, fault_of, stores_of
from rollout_io.dataset.storage import Paths
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
        dataset: The dataset, whose stores have the pictures.

    Attributes:
        placeholder: Id of the tokens whose embeddings the features of a picture replace.

    Raises:
        InputError: `picture_processor`: the processor cannot be loaded.
    """

    def __init__(self, model: str, dataset: Paths) -> None:
        placeholder = placeholder_of(model)
        assert placeholder is not None
        self.placeholder = placeholder
        self._prepare = load_image_processor(model)
        self._stores = stores_of(dataset)
        self._prepared = lru_cache(maxsize=MOST_PREPARED)(self._read)

    def load(self, names: Sequence[str]) -> list[Mapping[str, Tensor]]:
        """Return what the image processor makes of each picture: tensors by name."""
        return [self._prepared(name) for name in names]

    def open(self, name: str, where: str = "") -> Image.Image:
        """Read a picture, in RGB; `where` is the row that shows it, for messages.

        Raises:
            InvariantError: The file is missing or was changed.
            InputError: `picture_format`: the file is not a picture that Pillow can read.
        """
        content = next(filter(None, (store.read(name) for store in self._stores)), None)
        if content is None:
            fault = fault_of(name, self._stores) or "the file cannot be read"
            hint = "copy or move DS.blobs together with DS, or convert the log again"
            raise InvariantError(RULE, where or name, fault, "", hint)
        try:
            return opened(content)
        except Exception as error:  # Pillow's plugins do not wrap their errors
            finding = f"Pillow cannot read picture {name}: {type(error).__name__}"
            raise InputError("picture_format", where or name, finding) from error

    def prepare(self, picture: Image.Image, where: str) -> Mapping[str, Tensor]:
        """Return what the image processor makes of a picture.

        Raises:
            InputError: `picture_format`: it rejects the picture.
        """
        try:
            return dict(self._prepare(picture))
        except Exception as error:  # processors raise whatever their libraries raise
            size = f"{picture.width} x {picture.height} pixels"
            finding = (
                f"the image processor rejects a picture of {size}: {type(error).__name__}: {error}"
            )
            raise InputError("picture_format", where, finding) from error

    def _read(self, name: str) -> Mapping[str, Tensor]:
        return self.prepare(self.open(name), name)


def opened(content: bytes) -> Image.Image:
    """Decode a picture to RGB; transparent parts become white, as in vLLM."""
    picture = Image.open(BytesIO(content))
    if picture.mode != "RGBA":
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")


def load_image_processor(model: str) -> Any:
    """Return a function from a picture to the inputs of a model's encoder.

    The settings are those of the model's processor, which overrides some of its image processor's.
    """
    try:
        load: Any = AutoImageProcessor.from_pretrained
        processor = load(model, backend="pil", local_files_only=True, trust_remote_code=False)
        settings = _overrides(model)
    except Exception as error:  # Transformers does not wrap the errors of a configuration
        finding = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finding = f"Transformers cannot load an image processor: {finding}"
        raise InputError("picture_processor", model, finding) from error
    return lambda picture: processor(images=[picture], return_tensors="pt", **settings)


def _overrides(model: str) -> dict[str, Any]:
    """Return the settings of images by which a model's processor overrides its image processor."""
    for file in ("processor_config.json", "preprocessor_config.json"):
        path = Path(model) / file
        stored = json.loads(path.read_bytes()) if path.is_file() else {}
        processor = getattr(transformers, str(stored.get("processor_class")), None)
        if processor is not None:
            return dict(getattr(processor, "images_kwargs", {}))
    return {}
