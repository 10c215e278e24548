"""Local copies of remote directories; messages and sources show the original URLs.

URLs are shown without credentials.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from rollout_io.dataset.storage import Location
from rollout_io.formats.base import Found, Place, Rejected, Run
from schemas.errors import InputError, RolloutError, decode, encode

_COPY_BYTES = 4 << 20
_URL = r"\1://\2"


def copy_directory(url: str, spool: Path, ignored: Collection[str] = ()) -> Path:
    """Copy the files of a remote directory, except hidden ones, and return the copy.

    The path of the copy contains the path of the URL, because some formats name runs by their
    directories.

    Example:
        `s3://bucket/job` becomes `SPOOL/0.s3/bucket/job`, and `file:///job` becomes
        `SPOOL/0.file./job`.
    """
    location = Location.of(url)
    protocol, _, inner = shown(url).partition("://")
    number = len(list(spool.iterdir())) if spool.is_dir() else 0
    rooted = "." * inner.startswith("/")
    copy = (spool / f"{number}.{protocol}{rooted}").joinpath(*_parts(inner))
    copy.mkdir(parents=True)
    with reachable(url):
        paths = location.fs.find(location.path)
    skipped = _inside(location, ignored)
    for path in paths:
        name = path.removeprefix(location.path).removeprefix("/")
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if not is_hidden and not any(f"{path}/".startswith(f"{other}/") for other in skipped):
            file = copy.joinpath(*_parts(name))
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("xb") as local:
                    local.writelines(_blocks(location, path, url))
            except (FileExistsError, NotADirectoryError) as error:
                where = f"{shown(url).rstrip('/')}/{name}"  # such as `a//b` beside `a/b`
                finding = "another object would have the same path in the local copy"
                hint = "rename one of the two, or pass their URLs one by one"
                raise InputError("input_file", where, finding, "", hint) from error
    return copy


def _inside(location: Location, ignored: Collection[str]) -> list[str]:
    """Return the ignored paths that are inside a remote directory."""
    locations = [Location.of(path) for path in ignored if is_url(path)]
    if location.is_local:  # file://
        paths = [str(Path(path).absolute()) for path in ignored if not is_url(path)]
        locations += [Location(location.fs, path) for path in paths]
    top = f"{location.path.rstrip('/')}/"
    return [o.path for o in locations if o.fs == location.fs and o.path.startswith(top)]


def _blocks(location: Location, path: str, url: str) -> Iterator[bytes]:
    with reachable(url), location.fs.open(path, "rb") as remote:
        yield from iter(lambda: remote.read(_COPY_BYTES), b"")


def _parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in {"", ".", ".."}]


def url_of(path: Path | str, spool: Path) -> str:
    """Replace the paths of local copies in a text with the original URLs."""
    return re.sub(_pattern(spool), _URL, str(path))


def _pattern(spool: Path) -> str:
    return re.escape(str(spool)) + r"/\d+\.([a-z][a-z0-9+]*)(?:/|\.(/))"


def holds_copies(spool: Path) -> bool:
    """True if a remote directory was copied."""
    return spool.is_dir() and any(path.is_dir() for path in spool.iterdir())


def named_found(items: Iterable[Found], spool: Path) -> Iterator[Found]:
    """Replace the paths of local copies in an adapter's findings with the original URLs."""
    if not holds_copies(spool):
        yield from items
        return
    for item in items:
        if isinstance(item, Run):
            item.instance_id = url_of(item.instance_id, spool)
            item.labels = {name: url_of(label, spool) for name, label in item.labels.items()}
            item.places = [_named_place(place, spool) for place in item.places]
            yield item
        else:
            yield named_rejection(item, spool) if isinstance(item, Rejected) else item


def named_table(table: pa.Table, spool: Path) -> pa.Table:
    """Replace the paths of local copies in text columns, such as `source`, with the original URLs."""
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            named = pc.replace_substring_regex(table.column(index), _pattern(spool), _URL)
            table = table.set_column(index, field, named)
    return table


def named_rejection(rejected: Rejected, spool: Path) -> Rejected:
    """Replace the paths of local copies in a rejection with the original URLs."""
    return rejected._replace(
        place=_named_place(rejected.place, spool), error=named_error(rejected.error, spool)
    )


def _named_place(place: Place, spool: Path) -> Place:
    return structs.replace(place, where=url_of(place.where, spool))


def named_error(error: RolloutError, spool: Path) -> RolloutError:
    """Replace the paths of local copies in an error with the original URLs."""
    fields = encode(error)
    named = {name: text and url_of(text, spool) for name, text in fields.items()}
    return error if named == fields else decode(named)


@contextmanager
def naming_errors(spool: Path) -> Iterator[None]:
    """Replace the paths of local copies in raised errors with the original URLs."""
    try:
        yield
    except RolloutError as error:
        named = named_error(error, spool)
        if named is error:
            raise
        raise named from None


WEB = ("http://", "https://")


def is_url(path: str) -> bool:
    """True for a URL, such as `s3://bucket/logs/a.jsonl`."""
    return "://" in path


def shown(path: str) -> str:
    """Return a path or URL for display: no passwords and, for web URLs, no user and no query."""
    if not is_url(path):
        return path
    protocol, _, rest = path.partition("://")
    host, slash, inner = rest.partition("/")
    user, at, host = host.rpartition("@")
    is_web = path.startswith(WEB)
    user, at = ("", "") if is_web else (user.partition(":")[0], at)
    return f"{protocol}://{user}{at}{host}{slash}{inner.partition('?')[0] if is_web else inner}"


@contextmanager
def reachable(url: str) -> Iterator[None]:
    """Convert any error of a remote filesystem to an `InputError`."""
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        finding = " ".join((getattr(error, "strerror", None) or str(error) or repr(error)).split())
        named = shown(url)
        finding = (finding[:1].lower() + finding[1:]).replace(url, named)
        hint, message = "check the URL and your credentials", f"cannot read {named}: {finding}"
        raise InputError("input_file", named, finding, "", hint, message=message) from error
