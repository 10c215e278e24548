"""Sessions whose records form a tree: each refers to the record before it.

A path from the root to a leaf is a branch: a user went back and continued from an earlier record. The
branches become contexts in the order of their ends, so that the live branch is the last. Answers that
several branches share are trained on in the first. A compaction on a path ends a context and begins
another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sessions import Contexts, Item
from schemas.messages import is_answer

ORPHANS = "records whose parent is not in the file: read as if they followed the line before"


class Node(NamedTuple):
    """A record of the tree.

    Attributes:
        parent: Key of the record before it; None if it is the first.
        item: What it adds to a context; its key is the key of the record.
        compacts: Returns the items that replace those before it, given the path to it; None if it
            is no compaction.
        aliases: Other keys by which records refer to it.
    """

    parent: str | None
    item: Item
    compacts: Callable[[Sequence[Node]], list[Item]] | None = None
    aliases: Sequence[str] = ()


def add_branches(nodes: Sequence[Node], contexts: Contexts) -> None:
    """Add the contexts of all branches with answers.

    Args:
        nodes: Records in the order of the file, with distinct keys.
        contexts: Contexts of the session.
    """
    parents = _parents(nodes)
    by_key = {node.item.key: node for node in nodes}
    inner = {parent for parent in parents.values() if parent is not None}
    visited: set[str] = set()
    for node in nodes:
        if node.item.key in inner:
            continue
        new = []
        for key in _up(node.item.key, parents):
            if key in visited:
                break
            new.append(by_key[key])
        visited |= {each.item.key for each in new}
        if any(is_answer(message) for each in new for message in each.item.messages):
            path = [by_key[key] for key in _up(node.item.key, parents)]
            _add_path(path[::-1], contexts)


def _parents(nodes: Sequence[Node]) -> dict[str, str | None]:
    names = {alias: node.item.key for node in nodes for alias in node.aliases}
    names |= {node.item.key: node.item.key for node in nodes}
    found: dict[str, str | None] = {}
    before: str | None = None
    for node in nodes:
        parent = names.get(node.parent) if node.parent is not None else None
        if node.parent is not None and (parent is None or parent == node.item.key):
            parent = before
            note(ORPHANS)
        found[node.item.key] = parent
        before = node.item.key
    return found


def _up(key: str | None, parents: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a record and those before it, to the root."""
    seen: set[str] = set()
    while key is not None and key not in seen:
        seen.add(key)
        yield key
        key = parents[key]


def _add_path(path: Sequence[Node], contexts: Contexts) -> None:
    items: list[Item] = []
    for i, node in enumerate(path):
        if node.compacts is not None:
            contexts.add(items)
            items = node.compacts(path[:i])
        items.append(node.item)
    contexts.add(items)
