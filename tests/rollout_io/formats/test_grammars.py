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
    """The attributes that a module reads: by name, by `getattr`, or by the pattern of a `match`."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.MatchClass):
            yield from node.kwd_attrs
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def modules_of(grammar):
    """The module of a reader, and those of our own that it imports."""
    module = sys.modules[grammar.read.__module__]
    parents = {getattr(value, "__module__", None) for value in vars(module).values()}
    ours = {name for name in parents if name and name.startswith("rollout_io.formats.")}
    return {module, *(sys.modules[name] for name in ours)}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_format_uses_every_field_that_it_declares(name):
    grammar = GRAMMARS[name]
    structs = {s for kind in grammar.records.values() for s in structs_in(kind)}
    own = {s.__module__ for s in structs if ".dialects." in s.__module__}
    own.add(grammar.read.__module__)
    structs = {s for s in structs if s.__module__ in own and not reads_all(s)}
    modules = modules_of(grammar) | {sys.modules[name] for name in own}
    used = {attribute for module in modules for attribute in names_used_in(module)}
    unused = {
        f"{struct.__name__}.{field}"
        for struct in structs
        for field, hint in typing.get_type_hints(struct).items()
        if field not in used and not (is_number(hint) and "metrics" in used)
    }
    assert unused == set()


def reads_all(struct):
    """True if the module of a struct, or one above it, reads all of its fields in a loop."""
    sources = [inspect.getsource(sys.modules[base.__module__]) for base in struct.__mro__[:-2]]
    loops = ("structs.asdict", "structs.fields", "__struct_fields__")
    return any(loop in source for source in sources for loop in loops)


def is_number(hint):
    """True for a field whose numbers become metrics, without being named."""
    return bool({int, float, msgspec.Raw} & {hint, *typing.get_args(hint)})


def test_most_formats_of_sessions_state_their_grammar_once():
    assert len(GRAMMARS) > 15
