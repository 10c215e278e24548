"""The error ids that the product's code raises, found without running it.

`error_sites` lists every call of an error class with the ids it can have. An id is a literal, a
constant of this or of an imported module, a local variable, an attribute, an f-string of these, or
a parameter: then it is what the callers pass. An id that cannot be followed raises `Unresolved`,
so no site is left out silently.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

PACKAGES = ("schemas", "rollout_io", "pipelines", "trainer")
BASE = "RolloutError"
CHOICES = {f"{rule} in RULES" for rule in ("rule", "rule.id", "error.broken_rule")}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.ClassDef | Function


class Unresolved(Exception):
    """The code builds an id in a way that this module does not follow."""


@dataclass(frozen=True)
class Site:
    """A call of an error class.

    Attributes:
        where: "schemas/checker.py:63".
        raised: The errors it can be: the kind (the class that derives from `RolloutError`) and the
            id.
    """

    where: str
    raised: frozenset[tuple[str, str]]

    @property
    def ids(self) -> set[str]:
        return {error_id for _, error_id in self.raised}


@dataclass(frozen=True, eq=False)
class Module:
    """A file, parsed."""

    name: str
    file: str
    tree: ast.Module
    _assigned: dict[ast.AST, dict[str, list[ast.expr]]] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def scopes(self, node: ast.AST) -> Iterator[Scope]:
        """The functions, classes and module round a node, inside out."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, Scope):
                yield node

    def assigned(self, scope: ast.Module | Function) -> dict[str, list[ast.expr]]:
        """The values that are assigned to each name of a scope."""
        if scope not in self._assigned:
            found: dict[str, list[ast.expr]] = {}
            for node in ast.walk(scope) if isinstance(scope, Function) else scope.body:
                for name, value in _assigned(node):
                    found.setdefault(name, []).append(value)
            self._assigned[scope] = found
        return self._assigned[scope]

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Module and name of each imported name."""
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in self.nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }


def error_sites(root: Path, invariants: frozenset[str]) -> list[Site]:
    """All calls of error classes in the product's packages, in order."""
    return _Project(root, invariants).sites()


@dataclass
class _Project:
    root: Path
    invariants: frozenset[str]
    _open: set[ast.AST] = field(default_factory=set)

    @cached_property
    def modules(self) -> dict[str, Module]:
        found = {}
        for package in PACKAGES:
            for path in sorted((self.root / package).rglob("*.py")):
                file = path.relative_to(self.root).as_posix()
                name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                found[name] = Module(name, file, ast.parse(path.read_text(encoding="utf-8")))
        return found

    @cached_property
    def errors(self) -> dict[str, str]:
        """Each error class with its kind: the class below `RolloutError` that it is or is of."""
        found = {BASE: BASE}
        bases = [
            (node.name, [base.id for base in node.bases if isinstance(base, ast.Name)])
            for module in self.modules.values()
            for node in module.nodes
            if isinstance(node, ast.ClassDef)
        ]
        while new := {
            name: name if base == BASE else found[base]
            for name, names in bases
            for base in names
            if base in found and name not in found
        }:
            found |= new
        return found

    def sites(self) -> list[Site]:
        return [site for module in self.modules.values() for site in self._sites(module)]

    def _sites(self, module: Module) -> Iterator[Site]:
        for node in module.nodes:
            if isinstance(node, ast.Call) and (classes := self._classes(node.func, module)):
                if any(isinstance(argument, ast.Starred) for argument in node.args):
                    continue  # an error that is raised again, with other words
                given = node.args[0] if node.args else _keyword(node, "rule")
                assert given is not None, ast.unparse(node)
                where = f"{module.file}:{node.lineno}"
                ids = self._ids(given, module)
                pairs = product(classes, ids)
                if choice := self._choice(node.func, module):
                    pairs = ((choice[i in self.invariants], i) for i in ids)
                yield Site(where, frozenset(pairs))

    def _choice(self, called: ast.expr, module: Module) -> tuple[str, str] | None:
        """The kinds of other ids and of invariants: `kind = A if rule in RULES else B`."""
        values = self._local_values(called, module) if isinstance(called, ast.Name) else (called,)
        for value in values:
            if isinstance(value, ast.IfExp) and ast.unparse(value.test) in CHOICES:
                return self.errors[ast.unparse(value.orelse)], self.errors[ast.unparse(value.body)]
        return None

    def _classes(self, called: ast.expr, module: Module) -> set[str]:
        """The kinds of error that an expression can be; empty: it is no error class."""
        if isinstance(called, ast.IfExp):
            return self._classes(called.body, module) | self._classes(called.orelse, module)
        if isinstance(called, ast.Attribute):
            return self._class_attributes.get(called.attr, set())
        if not isinstance(called, ast.Name):
            return set()
        if called.id in self.errors:
            return {self.errors[called.id]}
        if called.id == "cls":
            owner = next(s for s in module.scopes(called) if isinstance(s, ast.ClassDef))
            return {self.errors[owner.name]} if owner.name in self.errors else set()
        found: set[str] = set()
        for value in self._local_values(called, module):
            found |= self._classes(value, module)
        if not found and self._is_class_parameter(called, module):
            found = self._of_callers(called, module, self._classes)
        return found

    @cached_property
    def _class_attributes(self) -> dict[str, set[str]]:
        """Attributes of classes that are error classes."""
        found: dict[str, set[str]] = {}
        for module in self.modules.values():
            for owner in module.nodes:
                for node in owner.body if isinstance(owner, ast.ClassDef) else ():
                    for name, value in _assigned(node):
                        if isinstance(value, ast.Name) and value.id in self.errors:
                            found.setdefault(name, set()).add(self.errors[value.id])
        return found

    def _is_class_parameter(self, name: ast.Name, module: Module) -> bool:
        for scope in module.scopes(name):
            for argument in _parameters(scope) if isinstance(scope, Function) else ():
                if argument.arg == name.id and argument.annotation is not None:
                    text = ast.unparse(argument.annotation)
                    return text.startswith("type[") and any(error in text for error in self.errors)
        return False

    def _ids(self, node: ast.expr, module: Module) -> set[str]:
        if node in self._open:  # a parameter that is passed on to the same function
            return set()
        self._open.add(node)
        try:
            return self._found(node, module)
        finally:
            self._open.remove(node)

    def _found(self, node: ast.expr, module: Module) -> set[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return {node.value}
        if isinstance(node, ast.IfExp):
            return self._ids(node.body, module) | self._ids(node.orelse, module)
        if isinstance(node, ast.JoinedStr):
            parts = [self._ids(part, module) for part in node.values]
            return {"".join(text) for text in product(*parts)}
        if isinstance(node, ast.FormattedValue):
            return self._ids(node.value, module)
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "'rule'":
            return set(self.invariants)  # a row of breaches
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node, module)
        if isinstance(node, ast.Name):
            return self._of_name(node, module)
        raise self._unresolved(node, module)

    def _of_name(self, name: ast.Name, module: Module) -> set[str]:
        found: set[str] = set()
        for value in self._local_values(name, module):
            found |= self._ids(value, module)
        if found:
            return found
        if name.id in module.imports:
            other, inner = module.imports[name.id]
            if other in self.modules:
                source = self.modules[other]
                if values := source.assigned(source.tree).get(inner):
                    return self._ids(values[-1], source)
        return self._of_callers(name, module, self._ids)

    def _local_values(self, name: ast.Name, module: Module) -> Sequence[ast.expr]:
        """What is assigned to a name in the innermost scope that has it; a parameter: nothing."""
        for scope in module.scopes(name):
            if isinstance(scope, ast.ClassDef):
                continue
            if name.id in module.assigned(scope):
                return module.assigned(scope)[name.id]
            if isinstance(scope, Function) and name.id in map(_name_of, _parameters(scope)):
                break
        return ()

    def _of_attribute(self, node: ast.Attribute, module: Module) -> set[str]:
        """`self._rule`: what its class assigns; `error.rule`: no new id; `kind.rule_id`, `unit.error_id`: by keyword."""
        if node.attr == "rule":
            return set()
        for scope in module.scopes(node):
            if isinstance(scope, ast.ClassDef):
                text = ast.unparse(node)
                for inner in ast.walk(scope):
                    if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == text:
                        return self._ids(inner.value, module)
        given = [
            (value, other)
            for record in ("Kind", "_Unit")
            for call, other in self._calls[record]
            if (value := _keyword(call, node.attr)) is not None
        ]
        if node.attr == "broken_rule":  # of an array: its type's or its values' rule
            calls = [c for name in ("Numbers", "_replace") for c, _ in self._calls[name]]
            pairs = [_keyword(c, "rules") or (c.args[-1] if c.args else None) for c in calls]
            rules = [e for pair in pairs if isinstance(pair, ast.Tuple) for e in pair.elts]
            named = {e.value for e in rules if isinstance(e, ast.Constant)}
            return {rule for rule in named if isinstance(rule, str)} | {
                "record_type",
                "token_range",
            }
        if node.attr == "id":  # of a rule of rows
            given = [(call.args[0], other) for call, other in self._calls["Rule"] if call.args]
        if not given:
            raise self._unresolved(node, module)
        return {found for value, other in given for found in self._ids(value, other)}

    def _of_callers(
        self, name: ast.Name, module: Module, read: Callable[[ast.expr, Module], set[str]]
    ) -> set[str]:
        """What all callers pass as a parameter."""
        for scope in module.scopes(name):
            if not isinstance(scope, Function):
                continue
            names = [*map(_name_of, _parameters(scope))]
            if name.id not in names:
                continue
            owner = module.parents[scope]
            is_method = isinstance(owner, ast.ClassDef)
            called = owner.name if is_method and scope.name == "__init__" else scope.name
            at = names.index(name.id) - is_method
            found: set[str] = set()
            for call, other in self._calls.get(called, []):
                if called.startswith("_") and other is not module:
                    continue
                if _is_name(call.func) == (is_method and called == scope.name):
                    continue
                value = _keyword(call, name.id)
                if value is None and len(call.args) > at:
                    value = call.args[at]
                value = _default(scope, name.id) if value is None else value
                if value is None:
                    raise self._unresolved(call, other)
                found |= read(value, other)
            return found
        raise self._unresolved(name, module)

    @cached_property
    def _calls(self) -> dict[str, list[tuple[ast.Call, Module]]]:
        """All calls, by the name of what is called."""
        found: dict[str, list[tuple[ast.Call, Module]]] = {}
        for module in self.modules.values():
            for node in module.nodes:
                if isinstance(node, ast.Call) and (name := _called(node.func)) is not None:
                    found.setdefault(name, []).append((node, module))
        return found

    def _unresolved(self, node: ast.expr, module: Module) -> Unresolved:
        return Unresolved(f"{module.file}:{node.lineno}: {ast.unparse(node)}")


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and values of an assignment or of a loop over a literal."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _paired(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from _paired(node.target, node.value)
    elif isinstance(node, ast.For):
        for value in _elements(node.iter):
            yield from _paired(node.target, value)


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _paired(one, other)


def _elements(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Tuple | ast.List):
        yield from node.elts
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("}.items"):
        assert isinstance(node.func, ast.Attribute)
        items = node.func.value
        assert isinstance(items, ast.Dict)
        for key, value in zip(items.keys, items.values, strict=True):
            if key is not None:
                yield ast.Tuple(elts=[key, value])


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _name_of(argument: ast.arg) -> str:
    return argument.arg


def _default(function: Function, name: str) -> ast.expr | None:
    arguments = function.args
    places = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(places), reversed(arguments.defaults), strict=False)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d]
    return next((default for argument, default in pairs if argument.arg == name), None)


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _called(function: ast.expr) -> str | None:
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else None


def _is_name(function: ast.expr) -> bool:
    return isinstance(function, ast.Name)
