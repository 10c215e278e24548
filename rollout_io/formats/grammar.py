"""The grammar of a format: which records its logs consist of, and what of them is read.

Each type of record has a struct, whose fields are what is read. What is left out is listed with the
reason. Everything else that a record holds is counted (`contents`), so a struct must not have a field
that its reader does not use.

    class Message(msgspec.Struct):
        role: str
        content: Annotated[msgspec.Raw, inner(anthropic.BLOCKS)] = NO_JSON

    Grammar(kind="type", records={"message": Message}, leaves={"facts": "*/time"}, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
from msgspec import inspect

from rollout_io.formats.contents import EVERY, SELF, Contents

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
