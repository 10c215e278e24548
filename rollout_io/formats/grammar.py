"""The grammar of a format: which records its logs consist of, what of them is read, and what is left out.

Each type of record has a struct, whose fields are what is read. What is left out is listed with the
reason. Everything else that a record holds is counted, so a struct must not have a field that its reader
does not use.

    class Message(msgspec.Struct):
        role: str
        content: Annotated[msgspec.Raw, inner(anthropic.BLOCKS)] = NO_JSON

    Grammar(kind="type", records={"message": Message}, leaves={"facts": "*/time"}, ...)

A grammar has `Contents`: what is read and left out, as lists of keys. An adapter calls `account` for
every record that it reads. Whatever is in neither list and holds text is counted under its name, such as
`user.message.origin`: the model may have seen it. So is what refers to another record, file or session,
or marks a message (`MARKS`), whatever its value: it may change what the model saw, or whether it is
trained on. The conversion warns about these names, and rejects the run with `--strict`. The documentation
of formats shows the lists, and detection compares them with the keys of a file (`coverage`).

    CONTENTS = Contents(
        kind="type",
        reads={"*": "uuid sessionId", "user": "message.role message.content"},
        leaves={"shown to the user only": "title */version user/toolUseResult"},
        inner={"user/message.content": anthropic.BLOCKS},
    )

A path names keys, joined by dots; lists are transparent, `*` is any key, and everything below the
end of a path belongs to it. In `reads`, paths are grouped by the type of the record; in `leaves` and
`inner`, the type precedes the path (`user/toolUseResult`), and a type without a path is left out
entirely. The type `*` stands for all types that are listed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from rollout_io.formats.base import note_unread
from rollout_io.formats.unread import clip, holds_text, is_mark

EVERY = "*"
SELF = "self"
_DECODER = msgspec.json.Decoder()


@dataclass(slots=True)
class _Node:
    """A key of a record.

    Attributes:
        keys: The keys below it that are listed.
        is_whole: True if everything below it is listed.
        inner: Contents of the records below it.
    """

    keys: dict[str, _Node] = field(default_factory=dict)
    is_whole: bool = False
    inner: Contents | None = None

    def add(self, path: str, inner: Contents | None = None) -> None:
        """List a path below this key."""
        node = self
        for key in path.split("."):
            node = node.keys.setdefault(key, _Node())
        node.inner = inner or node.inner
        node.is_whole = node.inner is None


class Coverage(NamedTuple):
    """How many keys of some records a format knows.

    Attributes:
        unknown: Names of the keys, and of the types of records, that it does not know.
    """

    num_known: int
    num_keys: int
    unknown: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the keys that are known."""
        return self.num_known / max(self.num_keys, 1)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Record types and keys of a format; see the module.

    Attributes:
        kind: Key that has the type of a record; empty if all records have one type, whose paths are
            then written without a type.
        subkind: Key that divides a type: `system` with a `subtype` is the type `system:subtype`, if
            that is listed.
        default: Type of a record without the key `kind`.
        reads: For each type, its paths that are read, separated by spaces.
        leaves: What is left out, by the reason.
        inner: Contents of the records that are found at a path; `SELF` stands for these contents.
    """

    kind: str = ""
    subkind: str = ""
    default: str = ""
    reads: Mapping[str, str]
    leaves: Mapping[str, str] = field(default_factory=dict)
    inner: Mapping[str, Contents | str] = field(default_factory=dict)

    @cached_property
    def _types(self) -> dict[str, _Node]:
        left_out = [
            _split(path, self.kind) for paths in self.leaves.values() for path in paths.split()
        ]
        inner = [(*_split(path, self.kind), nodes) for path, nodes in self.inner.items()]
        names = {*self.reads, *(kind for kind, _ in left_out), *(kind for kind, _, _ in inner)}
        nodes = {name: _Node() for name in names - {EVERY}}
        for name, node in nodes.items():
            for kind in (EVERY, name):
                for path in self.reads.get(kind, "").split():
                    node.add(path)
            for kind, path in left_out:
                if kind in {EVERY, name} and path:
                    node.add(path)
                node.is_whole |= kind == name and not path
            for kind, path, contents in inner:
                if kind in {EVERY, name}:
                    node.add(path, contents if isinstance(contents, Contents) else self)
        return nodes

    @property
    def types(self) -> Collection[str]:
        """The types of records that are listed."""
        return self._types.keys()

    @cached_property
    def _marks(self) -> set[str]:
        return {self.kind, self.subkind} - {""}

    def _type_of(self, record: Mapping[str, Any]) -> str:
        kind = record.get(self.kind) if self.kind else None
        name = kind if isinstance(kind, str) else self.default
        part = record.get(self.subkind) if self.subkind else None
        divided = f"{name}:{part}"
        return divided if isinstance(part, str) and divided in self._types else name

    def plus(
        self,
        *,
        reads: Mapping[str, str] = MappingProxyType({}),
        leaves: Mapping[str, str] = MappingProxyType({}),
        inner: Mapping[str, Contents | str] = MappingProxyType({}),
    ) -> Contents:
        """Return these contents with more entries, such as the fields that a harness adds."""
        both = {
            kind: f"{self.reads.get(kind, '')} {paths}".strip() for kind, paths in reads.items()
        }
        return replace(
            self,
            reads={**self.reads, **both},
            leaves={**self.leaves, **leaves},
            inner={**self.inner, **inner},
        )

    def unread(self, record: Any, tell: Callable[[str], object]) -> None:
        """Call `tell` with the name of everything in a record that holds text and is not listed."""
        stack = [(record, _Node(inner=self), "")]
        while stack:
            value, node, where = stack.pop()
            if isinstance(value, list):
                stack.extend((inner, node, where) for inner in value)
            if not isinstance(value, dict):
                continue
            marks: set[str] = set()
            if node.inner is not None:
                kind, marks = node.inner._type_of(value), node.inner._marks
                where = f"{where}[{clip(kind)}]" if where and kind else where or clip(kind)
                type_node = node.inner._types.get(kind)
                if type_node is None:
                    tell(where or "record")
                    continue
                node = type_node
            for key, inner in value.items():
                if key in marks or (node.is_whole and key not in node.keys):
                    continue  # what is left out entirely may still have keys that are read in part
                below = node.keys.get(key) or node.keys.get(EVERY)
                name = f"{where}.{clip(key)}" if where else clip(key)
                if below is None:
                    if holds_text(inner) or (inner is not None and is_mark(key)):
                        tell(name)
                elif below.keys or not below.is_whole:
                    stack.append((inner, below, name))

    def coverage(self, records: Iterable[Mapping[str, Any]]) -> Coverage:
        """Return how many keys of these records, at their top level, are listed."""
        num_known = num_keys = 0
        unknown: dict[str, None] = {}
        for record in records:
            kind = self._type_of(record)
            node = self._types.get(kind)
            keys = () if node is None else node.keys
            listed = [k for k in record if k in self._marks or k in keys or EVERY in keys]
            if node is None:
                listed = []
                unknown[kind or "record"] = None
            elif node.is_whole:
                listed = list(record)
            else:
                unknown |= dict.fromkeys(clip(key) for key in record if key not in listed)
            num_known, num_keys = num_known + len(listed), num_keys + len(record)
        return Coverage(num_known, num_keys, tuple(unknown))

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (type, keys, reason) of everything that is listed; what is read has no reason."""
        read = {kind: paths.split() for kind, paths in self.reads.items()}
        for path in self.inner:
            kind, inner_path = _split(path, self.kind)
            read.setdefault(kind, []).append(inner_path)
        table = [(kind, " ".join(paths), "") for kind, paths in read.items() if paths]
        for reason, paths in self.leaves.items():
            by_type: dict[str, list[str]] = {}
            for kind, path in (_split(path, self.kind) for path in paths.split()):
                by_type.setdefault(kind, []).append(path)
            table += [
                (kind, " ".join(paths_left_out), reason) for kind, paths_left_out in by_type.items()
            ]
        return table


def account(contents: Contents, record: Any, where: str = "") -> None:
    """Note everything in a record that the format neither reads nor leaves out on purpose."""
    if isinstance(record, bytes | msgspec.Raw):
        try:
            record = _DECODER.decode(record)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
    prefix = f"{where}." if where else ""
    contents.unread(record, lambda name: note_unread(prefix + name))


def _split(path: str, kind: str) -> tuple[str, str]:
    """Return the type and the path of an entry."""
    if not kind:
        return "", path
    name, _, rest = path.partition("/")
    return name, rest


_INNER = "contents"
_VALID = msgspec.json.Decoder(msgspec.Raw)


def inner(contents: Contents) -> msgspec.Meta:
    """Return the annotation of a field whose value has contents of its own."""
    return msgspec.Meta(extra={_INNER: contents})


ITSELF = msgspec.Meta(extra={_INNER: SELF})
"""Annotates a field whose values are records of the same grammar, such as a whole history."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The records of a format.

    Attributes:
        kind, subkind, default, leaves: As in `Contents`.
        payload: Key below which the fields of the structs are; "": at the top level.
        records: Struct of each type that is read; None if nothing but its type is. Types that are not
            listed have the struct of `*`, which comes first and whose fields all types have. A record
            that is a list has a list of structs.
    """

    kind: str = ""
    subkind: str = ""
    default: str = ""
    payload: str = ""
    records: Mapping[str, Any]
    leaves: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def contents(self) -> Contents:
        """What is read and what is left out, as lists of keys."""
        reads, below = dict[str, str](), dict[str, Contents | str]()
        shared = set[str]()
        for kind, struct in self.records.items():
            kind_of = None if struct is None else inspect.type_info(struct)
            listed = [] if kind_of is None else [*_below(kind_of, self.payload)]
            prefix = f"{kind}/" if self.kind else ""
            paths = [path for path, contents in listed if contents is None and path not in shared]
            reads[kind] = " ".join(paths)
            shared |= {*paths} if kind == EVERY else set()
            below |= {f"{prefix}{path}": nested for path, nested in listed if nested is not None}
        return Contents(
            kind=self.kind,
            subkind=self.subkind,
            default=self.default,
            reads=reads,
            leaves=self.leaves,
            inner=below,
        )

    @cached_property
    def _head(self) -> msgspec.json.Decoder[Any]:
        names = {"kind": self.kind, "subkind": self.subkind}
        fields: list[Any] = [
            (name, Any, msgspec.field(name=key or name, default=None))
            for name, key in names.items()
        ]
        payload = msgspec.field(name=self.payload or "payload", default=msgspec.Raw(b"{}"))
        fields.append(("payload", msgspec.Raw, payload))
        return msgspec.json.Decoder(msgspec.defstruct("Head", fields, gc=False))

    @cached_property
    def _decoders(self) -> dict[str, msgspec.json.Decoder[Any] | None]:
        return {
            kind: None if struct is None else msgspec.json.Decoder(struct)
            for kind, struct in self.records.items()
        }

    def split(self, content: bytes, where: str, decode: Callable[..., Any]) -> tuple[str, bytes]:
        """Return the type of a record, and the JSON of the fields of its struct.

        Raises:
            InputError: Any error of `decode`, which is `decode_line` or `decode_document`.
        """
        if not self.kind and not self.payload:
            decode(_VALID, content, where)
            return self.default, content
        head = decode(self._head, content, where)
        kind = head.kind if self.kind and isinstance(head.kind, str) else self.default
        divided = f"{kind}:{head.subkind}" if self.subkind else kind
        kind = divided if divided in self.records else kind
        return kind, bytes(head.payload) if self.payload else content

    def typed(self, content: bytes, where: str, decode: Callable[..., Any]) -> tuple[str, Any]:
        """Return the type of a record, and the record as its struct; None if it has none.

        Raises:
            InputError: `record_type`: a field is missing or has the wrong type.
        """
        if not self.kind and not self.payload:  # its only decoder finds what is no JSON
            return self.default, decode(self._decoders[self.default], content, where)
        kind, fields = self.split(content, where, decode)
        decoder = self._decoders.get(kind, self._decoders.get(EVERY))
        if decoder is None:
            return kind, None
        return kind, decode(decoder, fields, f"{where}, {self.payload}" if self.payload else where)


def _fields(
    struct: type[msgspec.Struct], payload: str
) -> Iterator[tuple[str, Contents | str | None]]:
    """Yield the paths of all fields of a struct, each with the contents of what is at its end."""
    whole = getattr(struct, _INNER, None)
    if isinstance(whole, Contents):
        yield payload, whole
        return
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    for member in info.fields:
        path = f"{payload}.{member.encode_name}" if payload else member.encode_name
        yield from _below(member.type, path)


def _below(kind: inspect.Type, path: str) -> Iterator[tuple[str, Contents | str | None]]:
    if isinstance(kind, inspect.Metadata):
        contents = (kind.extra or {}).get(_INNER)
        yield from [(path, contents)] if contents is not None else _below(kind.type, path)
    elif isinstance(kind, inspect.StructType):
        yield from _fields(kind.cls, path)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from _below(kind.item_type, path)
    elif isinstance(kind, inspect.UnionType):
        options = [option for option in kind.types if not isinstance(option, inspect.NoneType)]
        inner_types = [option for option in options if _is_structured(option)]
        for option in inner_types or options[:1]:
            yield from _below(option, path)
    else:
        yield path, None


def _is_structured(kind: inspect.Type) -> bool:
    """True if a type has fields of its own, itself or in a list."""
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return _is_structured(kind.item_type)
    is_inner = isinstance(kind, inspect.Metadata) and _INNER in (kind.extra or {})
    return is_inner or isinstance(kind, inspect.StructType)


def like(*patterns: Any) -> Callable[[Any], bool]:
    """Return a test for `is_record`: a decoded value has one of these forms.

    A pattern is a type, a set of values, a dictionary with a pattern for each key (None: the key is
    absent), or a list with the pattern of all its elements; anything else is a value. A text is the keys
    of an object.

    Example:
        >>> is_head = like(
        ...     {"type": {"session", "fork"}, "id": str, "message": None, "tools": [{"name": str}]}
        ... )
        >>> (
        ...     is_head({"type": "fork", "id": "1", "tools": []}),
        ...     is_head({"type": "fork", "id": 1, "tools": []}),
        ... )
        (True, False)
    """
    forms = [dict.fromkeys(p.split(), object) if isinstance(p, str) else p for p in patterns]
    return lambda value: any(_fits(value, form) for form in forms)


def _fits(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, type):
        return isinstance(value, pattern)
    if isinstance(pattern, dict):
        return isinstance(value, dict) and all(
            key not in value if part is None else key in value and _fits(value[key], part)
            for key, part in pattern.items()
        )
    if isinstance(pattern, list):
        return isinstance(value, list) and all(_fits(part, pattern[0]) for part in value)
    if isinstance(pattern, Collection) and not isinstance(pattern, str):
        return isinstance(value, str) and value in pattern
    return bool(value == pattern)
