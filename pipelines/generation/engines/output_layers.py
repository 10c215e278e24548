"""Model directories with an explicit output layer, which vLLM needs on a CPU to load new weights.

On a CPU, vLLM packs the weights of each linear layer, and `reload_weights` packs only layers whose
weights are in the directory. If embeddings are tied, the directory has no weights for the output
layer, which would therefore keep the packed weights of the previously loaded model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.errors import EngineError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OWN_FILE, INDEX = "output_layer.safetensors", "model.safetensors.index.json"
_OUTPUT = ("lm_head", "embed_out", "output.weight", "output_layer")
"""Parts of the names of output layers."""
_MOST_BYTES = 100_000_000
"""Maximum size of a header; a file with a larger header is not in safetensors format."""


def lacks_output_layer(path: Path) -> bool:
    """True if a model directory has no output layer, because it is tied to the input embeddings.

    False if its files cannot be read; vLLM then reports the reason.
    """
    try:
        names = [name for file in sorted(path.glob("*.safetensors")) for name in _header(file)[0]]
    except (OSError, ValueError):
        return False
    return bool(names) and not any(part in name for name in names for part in _OUTPUT)


class OutputLayers:
    """Copies model directories and adds an explicit output layer; `close` deletes the copies.

    A copy consists of links to the model's files, and one new file that stores the embeddings as
    the weights of the output layer. Only the latest copy is kept on disk, in the directory for
    temporary files (set by the environment variable TMPDIR).
    """

    def __init__(self) -> None:
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    def add(self, path: Path) -> Path:
        """Copy a model directory, add the output layer, and return the directory of the copy.

        Raises:
            EngineError: `engine_refused`: no tensor has the usual name of the embeddings.
        """
        folder = tempfile.TemporaryDirectory(prefix="rollouts-weights-")
        self._folders.append(folder)
        target = Path(folder.name)
        for file in path.iterdir():
            if file.is_file() and file.name != INDEX:
                (target / file.name).symlink_to(file.resolve())
        source = next((f for f in path.glob("*.safetensors") if EMBEDDING in _header(f)[0]), None)
        if source is None:
            finding = "on a CPU, vLLM needs the weights of the output layer to load a model"
            expected = f"{HEAD}, or tied embeddings named {EMBEDDING}"
            hint = "save the model with tie_word_embeddings=false, and start vLLM with it"
            message = f"{path}: {finding}; expected {expected}"
            raise EngineError("engine_refused", str(path), finding, expected, hint, message=message)
        _copy_tensor(source, EMBEDDING, target / OWN_FILE, HEAD)
        if (path / INDEX).is_file():
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            index["weight_map"] |= {HEAD: OWN_FILE}
            (target / INDEX).write_text(json.dumps(index), encoding="utf-8")
        return target

    def keep_latest(self) -> None:
        """Delete all copies except the latest."""
        for folder in self._folders[:-1]:
            folder.cleanup()
        del self._folders[:-1]

    def close(self) -> None:
        """Delete all copies."""
        for folder in self._folders:
            folder.cleanup()
        self._folders.clear()


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file: its tensors, and the offset of their data."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 0 < size <= _MOST_BYTES:
            raise ValueError(f"{file} is not in safetensors format")
        described = json.loads(opened.read(size))
    described.pop("__metadata__", None)
    return described, 8 + size


def _copy_tensor(source: Path, name: str, target: Path, new_name: str) -> None:
    """Copy one tensor to a new file, under a new name."""
    described, start = _header(source)
    tensor = described[name]
    begin, end = tensor["data_offsets"]
    header = {new_name: tensor | {"data_offsets": [0, end - begin]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    with source.open("rb") as read, target.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        read.seek(start + begin)
        for part in _parts(read, end - begin):
            written.write(part)


def _parts(opened: Any, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        part = opened.read(min(num_bytes, 1 << 24))
        if not part:
            raise EOFError("the file of a tensor is cut off")
        num_bytes -= len(part)
        yield part
