"""A model's image processor: the tokens that stand for a picture in a prompt.

An engine replaces the placeholder of each picture with as many tokens as the picture's size asks
for. Transformers' processor of the same model does the same, so the tokens that an engine reports
can be compared with it. Pictures are decoded here only.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_io.dataset.opening import refuse_irregular
from rollout_io.startup import importing_transformers
from schemas.errors import InputError, count
from schemas.imports import requires_extra

Tokens = npt.NDArray[np.int32]

MOST_PIXELS = 1 << 26
"""Largest picture that is decoded: 8192 x 8192."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded, in Pillow's names; others run programs or have no use in prompts."""

_MOST_KNOWN = 4096
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-f]+>")
_CONFIGS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class Expansion(NamedTuple):
    """What stands for a picture in a prompt.

    Attributes:
        text: Text in place of the placeholder.
        ids: [L] int32 tokens of the span: from the first to the last token of `text` that the
            vocabulary adds to its base. Plain text at the ends merges with the text around it.
    """

    text: str
    ids: Tokens


class PictureProcessor:
    """The processor of a model directory; create it with `load_processor`.

    Attributes:
        name: The directory.
        backend: The Transformers processor, without its video part.
    """

    def __init__(self, name: str, backend: Any) -> None:
        self.name, self.backend = name, backend
        self._known: dict[bytes, Expansion] = {}

    @property
    def token(self) -> str:
        """Text of the placeholder that the processor replaces."""
        token: str = self.backend.image_token
        return token

    @property
    def pads(self) -> frozenset[int]:
        """Ids that stand for parts of pictures, and nothing else."""
        return frozenset(int(token) for token in self.backend.image_token_ids if token is not None)

    def expansion(self, content: bytes, where: str) -> Expansion:
        """Return what stands for a picture.

        Args:
            content: Bytes of the picture's file.
            where: Name of the picture, for error messages.

        Raises:
            InputError: `picture_file`: the picture cannot be decoded, has too many pixels, or the
                processor refuses it.

        Example:
            A picture of 90 x 60 pixels, which Qwen2.5-VL divides into patches of 28 x 28:

            >>> load_processor("Qwen2.5-VL-3B/").expansion(content, "a.png").ids.tolist()
            [151655, 151655, 151655, 151655, 151655, 151655]
        """
        key = hashlib.sha256(content).digest()
        expansion = self._known.get(key)
        if expansion is None:
            image = open_picture(content, where)
            try:
                encoded = self.backend(images=[image], text=[self.token], add_special_tokens=False)
                ids = np.asarray(encoded["input_ids"][0], np.int32).reshape(-1)
            except Exception as error:  # processors raise whatever their arithmetic raises
                finding = (
                    f"the image processor refuses a picture of {_size(image)}: {_one_line(error)}"
                )
                hint = "check the limits in preprocessor_config.json, or leave out this run"
                raise InputError("picture_file", where, finding, "", hint) from None
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            expansion = self._known[key] = self._expansion(ids)
        return expansion

    def _expansion(self, ids: Tokens) -> Expansion:
        tokenizer = self.backend.tokenizer
        text = tokenizer.decode(
            ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        added = np.flatnonzero(np.isin(ids, list(tokenizer.added_tokens_decoder)))
        return Expansion(text, ids[added[0] : added[-1] + 1] if len(added) else ids)


def open_picture(content: bytes, where: str) -> Any:
    """Decode a picture as RGB, upright and on white, as vLLM does; of several frames, the first.

    Raises:
        InputError: `picture_file`: it cannot be decoded, or has more than `MOST_PIXELS` pixels.
        MissingExtra: `extra_installed`: Pillow is not installed.
    """
    with requires_extra("text", "reading pictures"):
        from PIL import Image, ImageOps
    hint = f"pictures are {', '.join(FORMATS)} files of at most {MOST_PIXELS:,} pixels"
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height <= MOST_PIXELS:
            upright = ImageOps.exif_transpose(image)
            if upright.mode == "RGB" or not upright.has_transparency_data:
                return upright.convert("RGB")
            layer, white = upright.convert("RGBA"), Image.new("RGB", upright.size, "white")
            white.paste(layer, mask=layer.getchannel("A"))
            return white
        finding = f"the picture has {_size(image)}"
    except Exception as error:  # Pillow does not wrap the errors of its parsers
        finding = f"the picture cannot be decoded: {_one_line(error)}"
    raise InputError("picture_file", where, finding, "", hint)


def load_image_processor(directory: str) -> Callable[[Any], dict[str, Any]]:
    """Load what prepares pictures for a local model's encoder; no tokenizer is needed.

    Returns:
        A function from a picture (`open_picture`) to tensors by name. Its settings are those of the
        model's processor, which overrides some of its image processor's.

    Raises:
        InputError: `processor`: the image processor cannot be loaded.
    """
    try:
        with importing_transformers():
            images = _images(directory)
            kind = _processor_class(directory, _files(directory))
        older: Any = getattr(kind, "valid_processor_kwargs", None)  # Transformers below 5.23
        defaults = getattr(older, "_defaults", {}).get("images_kwargs", {})
        settings = dict(getattr(kind, "images_kwargs", defaults))
    except Exception as error:  # Transformers does not wrap the errors of its parsers
        raise _not_loaded(directory, error) from None
    return lambda picture: dict(images(images=[picture], return_tensors="pt", **settings))


def load_processor(directory: str, tokenizer: Any) -> PictureProcessor | None:
    """Load the processor of a local model; no code of the directory is run.

    Args:
        directory: Directory of a model.
        tokenizer: Its Transformers tokenizer.

    Returns:
        None if the directory has no processor of pictures that Transformers knows.

    Raises:
        InputError: `processor`: the processor cannot be loaded.
        MissingExtra: `extra_installed`: a package that the processor needs is not installed.
    """
    files = _files(directory)
    if not {file.name for file in files} & {*_CONFIGS[:2]}:
        return None
    for file in files:
        refuse_irregular(file)
    try:
        with importing_transformers():
            backend = _load(directory, files, tokenizer)
    except Exception as error:  # Transformers does not wrap the errors of its parsers
        raise _not_loaded(directory, error) from None
    return None if backend is None else PictureProcessor(directory, backend)


def _files(directory: str) -> list[Path]:
    return [Path(directory, name) for name in _CONFIGS if Path(directory, name).is_file()]


def _not_loaded(directory: str, error: Exception) -> InputError:
    finding = f"the image processor cannot be loaded: {_one_line(error)}"
    hint = "check preprocessor_config.json and processor_config.json, and install what is missing"
    return InputError("processor", directory, finding, "", hint)


def _images(directory: str) -> Any:
    from transformers import AutoImageProcessor

    source: Any = AutoImageProcessor
    return source.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _processor_class(directory: str, configs: Sequence[Path]) -> Any:
    """Return the class of a model's processor in Transformers; None if it has none."""
    from transformers.models.auto import processing_auto

    names: Any = processing_auto
    settings = [json.loads(file.read_text(encoding="utf-8")) for file in configs]
    name = next((s["processor_class"] for s in settings if s.get("processor_class")), None)
    if name is None and (model := Path(directory, "config.json")).is_file():
        kind = json.loads(model.read_text(encoding="utf-8")).get("model_type")
        name = names.PROCESSOR_MAPPING_NAMES.get(kind)
    return None if name is None else names.processor_class_from_name(name)


def _load(directory: str, configs: Sequence[Path], tokenizer: Any) -> Any:
    kind = _processor_class(directory, configs)
    if kind is None or "image_processor" not in kind.get_attributes():
        return None
    parts = {"image_processor": _images(directory), "tokenizer": tokenizer}
    # Processors of videos need Torchvision, and the class checks that each part is there.
    checks = {"check_argument_for_proper_class": lambda *_: None}
    without_video: Any = type(kind.__name__, (kind,), checks)
    stored, _ = kind.get_processor_dict(directory, local_files_only=True)
    arguments = [parts.get(part) for part in kind.get_attributes()]
    processor = without_video.from_args_and_dict(arguments, stored)
    return processor if getattr(processor, "image_token", None) else None


def spans_in(
    ids: Tokens, expansions: Sequence[Expansion], pads: frozenset[int], where: str
) -> list[tuple[int, int]]:
    """Return (start, length) of each picture's tokens in a row, in order.

    Args:
        ids: [L] tokens of the row's prompt + response.
        expansions: Of the row's pictures, in order.
        pads: Ids that stand for parts of pictures.
        where: Name of the row, for error messages.

    Raises:
        InputError: `picture_tokens`: the tokens of a picture do not follow those of the one before,
            or tokens of pictures are left over.

    Example:
        >>> picture = Expansion("<p><p>", np.array([9, 9], np.int32))
        >>> ids = np.array([1, 9, 9, 2], np.int32)
        >>> spans_in(ids, [picture], frozenset({9}), "a.jsonl, line 1")
        [(1, 2)]
    """
    content, at, spans = np.ascontiguousarray(ids, np.int32).tobytes(), 0, list[tuple[int, int]]()
    hint = (
        "pass --tokenizer DIR of the model that sampled the row, with the picture sizes that its "
        "engine used (preprocessor_config.json)"
    )
    for number, expansion in enumerate(expansions, 1):
        start = _find(content, expansion.ids.astype(np.int32).tobytes(), at)
        if start < 0:
            finding = (
                f"the {count(len(expansion.ids), 'token')} of picture {number} of {len(expansions)}"
            )
            finding += f" are not in the row from token {at} on"
            raise InputError("picture_tokens", where, finding, "", hint)
        spans.append((start, len(expansion.ids)))
        at = start + len(expansion.ids)
    inside = np.zeros(len(ids), np.bool_)
    for start, length in spans:
        inside[start : start + length] = True
    left_over = np.flatnonzero(np.isin(ids, list(pads)) & ~inside)
    if len(left_over):
        finding = f"{count(len(left_over), 'token')} of pictures, the first at {left_over[0]}, "
        finding += f"{'belongs' if len(left_over) == 1 else 'belong'} to none of the row's "
        raise InputError(
            "picture_tokens", where, finding + count(len(expansions), "picture"), "", hint
        )
    return spans


def _find(content: bytes, wanted: bytes, at: int) -> int:
    """Return the first index of a run of int32 tokens from `at` on; -1 without one."""
    place = content.find(wanted, 4 * at)
    while place % 4 and place >= 0:
        place = content.find(wanted, place + 1)
    return place // 4


def _size(image: Any) -> str:
    return f"{image.width} x {image.height} pixels"


def _one_line(error: Exception) -> str:
    text = _ADDRESS.sub("the file", str(error))  # or equal errors would differ
    return f"{type(error).__name__}: {' '.join(text.split())[:200]}"
