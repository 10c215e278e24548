"""A format's structs are what its reader reads: a field that it does not use would count as read."""

import ast
import inspect
import sys
import typing

import msgspec
import pytest

from rollout_io.formats.detect import load_formats
from rollout_io.formats.grammar import Grammar

GRAMMARS = {
    name: adapter.find.__self__
    for name, adapter in load_formats().adapters.items()
    if isinstance(getattr(adapter.find, "__self__", None), Grammar)
}
"""The formats whose account of unread keys is derived from their structs."""


def structs_in(kind):
    """The structs in a type, and in the types of their fields."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from structs_in(hint)
    for inner in typing.get_args(kind):
        yield from structs_in(inner)


def names_used_in(module):
    """The attributes that a module reads, by name or by the pattern of a `match`."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.MatchClass):
            yield from node.kwd_attrs


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_format_uses_every_field_that_it_declares(name):
    grammar = GRAMMARS[name]
    modules = {sys.modules[grammar.read.__module__]}
    structs = {s for kind in grammar.records.values() for s in structs_in(kind)}
    modules |= {sys.modules[struct.__module__] for struct in structs}
    used = {attribute for module in modules for attribute in names_used_in(module)}
    unused = {
        f"{struct.__name__}.{field}"
        for struct in structs
        if "structs.asdict" not in inspect.getsource(sys.modules[struct.__module__])
        for field in struct.__struct_fields__
        if field not in used
    }
    assert unused == set()


def test_most_formats_of_sessions_state_their_grammar_once():
    assert len(GRAMMARS) > 15
