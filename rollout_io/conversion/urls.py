"""URLs of inputs: detection, display without credentials, and errors while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import InputError, RolloutError

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
        got = " ".join((getattr(error, "strerror", None) or str(error) or repr(error)).split())
        named = shown(url)
        got = (got[:1].lower() + got[1:]).replace(url, named)
        hint, message = "check the URL and your credentials", f"cannot read {named}: {got}"
        raise InputError("input_file", named, got, "", hint, message=message) from error
