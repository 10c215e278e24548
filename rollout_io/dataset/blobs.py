"""The store of a dataset's pictures, each written once, beside its shards.

    DS.blobs/SHA256.png       one file per content: pictures, documents, recordings

The column `pictures` and the parts of `messages` refer to a file by `sha256:` and its digest. A file
is written under a temporary name, synced and renamed before the shard that refers to it. Datasets
that are made from others take along the files that their rows refer to.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollout_io.dataset.filesystems import sync, writable
from rollout_io.dataset.storage import Location, PathLike, Paths, find_shards, move, temporary
from schemas.columns import PICTURES
from schemas.errors import InvariantError
from schemas.metadata import upgrade, version_of
from schemas.types import is_list

SUFFIX = ".blobs"
RULE = "picture_reference"
PREFIX = "sha256:"
_REFERENCE = re.compile(
    r"(?:segments\.list\.element\.)?(?:pictures\.list\.element\.sha256|images\.list\.element\.blob)"
)
_NAME = re.compile(r"([0-9a-f]{64})\.[a-z0-9]+")


class Blobs:
    """The files of a store.

    Args:
        folder: Directory of the store; it is created with the first file.

    Example:
        >>> Blobs.of("shop/").add(picture)
        'sha256:0f1e...'
    """

    def __init__(self, folder: Location) -> None:
        self.folder = folder

    @classmethod
    def of(cls, dataset: PathLike) -> Blobs:
        """Return the store of a dataset's directory."""
        location = Location.of(dataset)
        return cls(Location(location.fs, location.path.rstrip("/") + SUFFIX))

    @cached_property
    def files(self) -> dict[str, str]:
        """Paths of the files, by reference."""
        fs, path = self.folder.fs, self.folder.path
        names = fs.ls(path, detail=False) if fs.isdir(path) else []
        matches = ((_NAME.fullmatch(posixpath.basename(name)), name) for name in names)
        return {PREFIX + match[1]: name for match, name in matches if match}

    def add(self, content: bytes) -> str:
        """Write a file unless the store has it; return the reference to it.

        Raises:
            InputError: `output_file`: the file cannot be written.
        """
        digest = hashlib.sha256(content).hexdigest()
        if PREFIX + digest not in self.files:
            final = self.folder.join(digest + extension_of(content))
            with self._new(final) as written, written.fs.open(written.path, "wb") as file:
                file.write(content)
        return PREFIX + digest

    def take(self, name: str, stores: Sequence[Blobs]) -> None:
        """Link or copy a file of another store, unless this store has it; check its content.

        Args:
            name: Reference to the file.
            stores: Stores that may have it.

        Raises:
            InvariantError: `picture_reference`: no store has the file, or its content was changed.
        """
        if name in self.files:
            return
        if fault := fault_of(name, stores):
            where = (stores[0] if stores else self).folder.path.removesuffix(SUFFIX)
            hint = "copy or move DS.blobs together with DS, or convert the log again"
            raise InvariantError(RULE, where, fault, "", hint)
        holder = next(store for store in stores if name in store.files)
        source = Location(holder.folder.fs, holder.files[name])
        final = self.folder.join(posixpath.basename(source.path))
        with self._new(final) as written:
            if not (source.is_local and written.is_local and _linked(source.path, written.path)):
                with (
                    source.fs.open(source.path, "rb") as old,
                    written.fs.open(written.path, "wb") as new,
                ):
                    while piece := old.read(1 << 20):
                        new.write(piece)

    @contextmanager
    def _new(self, final: Location) -> Iterator[Location]:
        """Yield a temporary path; rename it afterwards, or remove it after an error."""
        written, folder = temporary(final), self.folder
        with writable(final.path):
            is_new = not folder.fs.isdir(folder.path)
            folder.fs.makedirs(folder.path, exist_ok=True)
            if is_new and folder.is_local:
                sync(Path(folder.path).parent)
            try:
                yield written
                move(written, final)
            except BaseException:
                with suppress(OSError):
                    written.fs.rm_file(written.path)
                raise
        self.files[PREFIX + posixpath.basename(final.path).partition(".")[0]] = final.path

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if the store lacks it, or if it was changed."""
        path = self.files.get(name)
        if path is None:
            return None
        with self.folder.fs.open(path, "rb") as file:
            content = bytes(file.read())
        return content if PREFIX + hashlib.sha256(content).hexdigest() == name else None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and the directory if it is then empty."""
        fs, folder = self.folder.fs, self.folder.path
        for name in names:
            if (path := self.files.pop(name, None)) is not None:
                fs.rm_file(path)
        with suppress(OSError):
            if fs.isdir(folder) and not fs.ls(folder):
                fs.rmdir(folder)


def _linked(source: str, target: str) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without links
        return False
    return True


def is_whole(file: Location, name: str) -> bool:
    """True if the content of a file has the digest of a reference."""
    with file.fs.open(file.path, "rb") as opened:
        digest = hashlib.sha256()
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return PREFIX + digest.hexdigest() == name


def stores_of(dataset: Paths) -> list[Blobs]:
    """Return the stores of an existing dataset: one beside each directory of its shards.

    A dataset that is one file may have a store beside the file, or beside its directory.
    """
    folders: dict[str, Blobs] = {}
    for shard in find_shards(dataset):
        folder = shard.root or posixpath.dirname(shard.path)
        for path in (folder, shard.path):
            store = Blobs(Location(shard.fs, path.rstrip("/") + SUFFIX))
            folders.setdefault(store.folder.path, store)
    return [store for store in folders.values() if store.files]


def names_in(table: pa.Table) -> set[str]:
    """Return the references in the column `pictures` of a table, and in the steps of merged rows."""
    references: set[str | None] = set()
    for column in _columns(table):
        entries = pc.list_flatten(column)
        if pa.types.is_struct(entries.type) and entries.type.get_field_index("sha256") >= 0:
            references |= set(pc.struct_field(entries, "sha256").unique().to_pylist())
    return {name for name in references if name is not None}


def _columns(table: pa.Table) -> Iterator[pa.ChunkedArray | pa.Array]:
    if PICTURES in table.column_names and is_list(table.schema.field(PICTURES).type):
        yield table.column(PICTURES)
    if "segments" in table.column_names:
        kind = table.schema.field("segments").type.value_type
        if kind.get_field_index(PICTURES) >= 0:
            yield pc.struct_field(pc.list_flatten(table.column("segments")), PICTURES)


def names_in_files(shards: Iterable[PathLike]) -> set[str]:
    """Return the references in shards; no other columns are read."""
    references: set[str] = set()
    for shard in (shard for path in shards for shard in find_shards(path)):
        with shard.fs.open(shard.path, "rb") as opened, pq.ParquetFile(opened) as file:
            paths = [file.schema.column(i).path for i in range(len(file.schema))]
            wanted = [path for path in paths if _REFERENCE.fullmatch(path)]
            for group in range(file.num_row_groups) if wanted else ():
                table = file.read_row_group(group, wanted)
                references |= names_in(upgrade(table, version_of(file.metadata.metadata)))
    return references


def carry(names: Iterable[str], sources: Iterable[PathLike], target: Blobs) -> list[str]:
    """Make files of other datasets available in a store; return those that it lacked.

    Args:
        names: References to the files.
        sources: Datasets whose stores may have the files.
        target: The store.

    Raises:
        InvariantError: `picture_reference`: a file is missing, or its content was changed.
    """
    lacking = sorted(name for name in names if name not in target.files)
    stores = [store for source in sources for store in stores_of(source)] if lacking else []
    for name in lacking:
        target.take(name, stores)
    return lacking


def fault_of(name: str, stores: Sequence[Blobs]) -> str | None:
    """Return what is wrong with the file of a reference; None if a store has it unchanged."""
    holder = next((store for store in stores if name in store.files), None)
    if holder is None:
        return f"the file {name} is missing"
    file = Location(holder.folder.fs, holder.files[name])
    if is_whole(file, name):
        return None
    return f"the content of {posixpath.basename(file.path)} is not {name}"


OTHER = ".bin"
_STARTS = (
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\x00", ".tiff"),
    (b"MM\x00*", ".tiff"),
    (b"%PDF-", ".pdf"),
    (b"ID3", ".mp3"),
    (b"OggS", ".ogg"),
    (b"fLaC", ".flac"),
)
_RIFF = {b"WEBP": ".webp", b"WAVE": ".wav", b"AVI ": ".avi"}
_BOXES = {b"avif": ".avif", b"heic": ".heic", b"mif1": ".heic"}
MEDIA_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".avif": "image/avif",
    ".heic": "image/heic",
    ".bmp": "image/bmp",
    ".tiff": "image/tiff",
    ".svg": "image/svg+xml",
    ".pdf": "application/pdf",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".flac": "audio/flac",
    ".mp4": "video/mp4",
    ".avi": "video/x-msvideo",
}
"""Media type by file extension."""


def extension_of(content: bytes) -> str:
    """Return the file extension for the first bytes of a file, which alone determine it.

    Example:
        >>> extension_of(b"GIF89a...")
        '.gif'
    """
    if content[:4] == b"RIFF":
        return _RIFF.get(content[8:12], OTHER)
    if content[4:8] == b"ftyp":
        return _BOXES.get(content[8:12], ".mp4")
    if re.match(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<svg[\s>]", content[:1024], re.DOTALL):
        return ".svg"
    return next((name for start, name in _STARTS if content.startswith(start)), OTHER)
