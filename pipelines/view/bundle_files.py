"""The built page: the only files that the server sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import InputError

FOLDER = Path(__file__).parent / "bundle"
"""Directory that the build writes the page to; wheels contain it."""

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of the page, held in memory.

    Attributes:
        files: Content and media type by path, such as "/assets/index.js".
    """

    files: Mapping[str, tuple[bytes, str]]

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Bundle:
        """Read the built page.

        Raises:
            InputError: `view_bundle`: the page is not built.
        """
        if not (folder / "index.html").is_file():
            got, hint = "the page of the viewer is not built", "build it: make view"
            raise InputError("view_bundle", str(folder), got, hint=hint, message=got.capitalize())
        found = {
            f"/{path.relative_to(folder).as_posix()}": (path.read_bytes(), _KINDS[path.suffix])
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _KINDS
        }
        return cls({**found, "/": found["/index.html"]})

    @property
    def page(self) -> str:
        """The HTML of the page."""
        return self.files["/"][0].decode()
