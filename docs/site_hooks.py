"""What `mkdocs build` does beyond mkdocs.yml: rank pages in the search, and link to the repository."""

from __future__ import annotations

import os
from typing import Any

BOOSTS = {
    "guides/": 4.0, "formats/": 2.0, "tour.md": 3.0, "install.md": 3.0, "cli.md": 0.5, "api/": 0.3, "errors.md": 0.1,
}  # fmt: skip
"""How much the words of a page count, by the start of its path: what people do is above what they look up."""


def on_config(config: Any) -> Any:
    """Link to the repository. Material's own key would ask its host for numbers of stars."""
    if url := os.environ.get("REPOSITORY_URL"):
        config["nav"].append({"Repository": url})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Set the rank of a page."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    return markdown
