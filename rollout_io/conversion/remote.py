"""Copies of remote directories, which are read like local ones and named by their URLs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.storage import Location
from rollout_io.formats.base import Found, Place, Rejected, Run
from schemas.errors import RolloutError, decode, encode

_COPY_BYTES = 4 << 20


def copy_directory(location: Location, url: str, spool: Path) -> Path:
    """Copy the files of a remote directory, except hidden ones, and return the copy.

    The path of the copy contains that of the URL, because names of directories can name runs.

    Args:
        location: The remote directory.
        url: Its URL, without credentials.
        spool: Directory for copies.

    Example:
        `s3://bucket/job` becomes `SPOOL/0.s3/bucket/job`.
    """
    protocol, _, inner = url.partition("://")
    number = len(list(spool.iterdir())) if spool.is_dir() else 0
    copy = (spool / f"{number}.{protocol}").joinpath(*_parts(inner))
    copy.mkdir(parents=True)
    for path in location.fs.find(location.path):
        names = path.removeprefix(location.path).strip("/").split("/")
        if not any(name.startswith(".") for name in names):
            file = copy.joinpath(*names)
            file.parent.mkdir(parents=True, exist_ok=True)
            with location.fs.open(path, "rb") as remote, file.open("wb") as local:
                shutil.copyfileobj(remote, local, _COPY_BYTES)
    return copy


def _parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in {"", ".", ".."}]


def url_of(path: Path | str, spool: Path) -> str:
    """Replace the names of copies in a text with their URLs."""
    return re.sub(_pattern(spool), r"\1://", str(path))


def _pattern(spool: Path) -> str:
    return re.escape(str(spool)) + r"/\d+\.([a-z][a-z0-9+]*)/"


def holds_copies(spool: Path) -> bool:
    """True if a remote directory was copied."""
    return spool.is_dir() and any(path.is_dir() for path in spool.iterdir())


def named_found(found: Iterable[Found], spool: Path) -> Iterator[Found]:
    """Replace the names of copies in what an adapter finds."""
    if not holds_copies(spool):
        yield from found
        return
    for item in found:
        if isinstance(item, Run):
            item.instance_id = url_of(item.instance_id, spool)
            item.labels = {name: url_of(label, spool) for name, label in item.labels.items()}
            item.places = [_named_place(place, spool) for place in item.places]
            yield item
        else:
            yield named_rejection(item, spool) if isinstance(item, Rejected) else item


def named_table(table: pa.Table, spool: Path) -> pa.Table:
    """Replace the names of copies in the column `source`."""
    if "source" not in table.column_names:
        return table
    index = table.column_names.index("source")
    named = pc.replace_substring_regex(table.column(index), _pattern(spool), r"\1://")
    return table.set_column(index, table.schema.field(index), named)


def named_rejection(rejected: Rejected, spool: Path) -> Rejected:
    """Replace the names of copies in a rejection."""
    return Rejected(_named_place(rejected.place, spool), named_error(rejected.error, spool))


def _named_place(place: Place, spool: Path) -> Place:
    return Place(place.path, url_of(place.where, spool), place.offset, place.num_bytes)


def named_error(error: RolloutError, spool: Path) -> RolloutError:
    """Replace the names of copies in an error."""
    fields = encode(error)
    named = {name: text and url_of(text, spool) for name, text in fields.items()}
    return error if named == fields else decode(named)


@contextmanager
def naming_errors(spool: Path) -> Iterator[None]:
    """Replace the names of copies in errors."""
    try:
        yield
    except RolloutError as error:
        named = named_error(error, spool)
        if named is error:
            raise
        raise named from None
