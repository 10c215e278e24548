"""Bounds on chat templates, which are programs of strangers: steps, time, and size of values.

Transformers renders templates in a sandbox that keeps them from files and attributes, but not from
endless loops or texts of any size. `bind` makes it use the environment below, which counts steps
and sizes inside `bounded` and behaves like the original everywhere else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError, nodes, pass_context
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 5_000_000
"""Limit on loop passes, calls and filters per rendering."""

MAX_CPU_S = 30.0
"""Limit on the CPU time per rendering, in seconds."""

MAX_CHARS = 16 << 20
"""Limit on the size of one value, in characters."""

MAX_TOTAL_CHARS = 512 << 20
"""Limit on the total size of all values that one rendering makes, in characters."""

MAX_WIDTH = 10_000
"""Limit on the widths, counts and indents passed to methods and filters."""

_STEPS_A_LOOK = 256
_MAX_BITS = 1 << 16
_SCALAR_CHARS = 8
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MAX_PATTERN_CHARS = 100_000
_WIDE = re.compile(
    r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\d{5,}|\*)"  # %99999d, %.99999f, %*d, %.*f
    r"|\{[^{}]*:[^{}]*(\d{5,}|\{)"  # {:99999}, {:{}}
)
_WIDENING = frozenset(
    {"center", "indent", "batch", "slice", "tojson", "wordwrap", "truncate", "format", "pprint"}
)
_SEARCHING = frozenset(
    {"find", "rfind", "index", "rindex", "count", "startswith", "endswith", "split", "rsplit"}
)


class TemplateBoundError(TemplateRuntimeError):
    """A chat template exceeded a bound."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._num_steps = self._num_chars = 0
        self._end_s = time.thread_time() + MAX_CPU_S
        # Weights of containers, which templates cannot change. The reference keeps the id valid.
        self._weights: dict[int, tuple[Any, int]] = {}

    def step(self) -> None:
        """Count one step.

        Raises:
            TemplateBoundError: There are too many steps, or they take too long.
        """
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise TemplateBoundError(f"more than {MAX_STEPS:,} loop passes and calls")
        if self._num_steps % _STEPS_A_LOOK == 0:
            self.look_at_clock()

    def look_at_clock(self) -> None:
        """Raise a `TemplateBoundError` if the time is used up."""
        if time.thread_time() > self._end_s:
            raise TemplateBoundError(f"more than {MAX_CPU_S:g} s of CPU time")

    def take(self, num_chars: int) -> None:
        """Count the characters of a new value, before it is made if possible.

        Raises:
            TemplateBoundError: The value is too large, or all values together are.
        """
        self._num_chars += num_chars
        if num_chars > MAX_CHARS or self._num_chars > MAX_TOTAL_CHARS:
            raise TemplateBoundError(f"a value of more than {MAX_CHARS:,} characters")

    def weigh(self, value: Any) -> Any:
        """Count a new value and return it."""
        if isinstance(value, str | bytes):
            self.take(len(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            if value.bit_length() > _MAX_BITS:
                raise TemplateBoundError(f"a number of more than {_MAX_BITS:,} bits")
        elif isinstance(value, _CONTAINERS):
            self._weight(value)
            self.take(len(value))
        elif isinstance(value, Namespace):
            raise TemplateBoundError("a namespace inside another value, or as text")
        return value

    def _weight(self, value: Any) -> int:
        """Return the length of a value's text, about; equal parts count every time they occur."""
        if isinstance(value, str | bytes):
            return len(value) + 2
        if not isinstance(value, _CONTAINERS):
            self.weigh(value)
            return _SCALAR_CHARS
        if (weighed := self._weights.get(id(value))) is not None:
            return weighed[1]
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        weight = 2 + sum(map(self._weight, parts))
        if weight > MAX_CHARS:
            raise TemplateBoundError(f"a value of more than {MAX_CHARS:,} characters")
        self._weights[id(value)] = value, weight
        return weight


_active: ContextVar[Budget | None] = ContextVar("_active", default=None)


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the rendering of templates inside a `with` block."""
    token = _active.set(Budget())
    try:
        yield
    finally:
        _active.reset(token)


def bind() -> None:
    """Let Transformers compile templates with `BoundedEnvironment`; repeating this has no effect."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    if module.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        module.ImmutableSandboxedEnvironment = BoundedEnvironment
        clear = getattr(module._compile_jinja_template, "cache_clear", None)
        if clear is not None:
            clear()  # templates that were compiled without bounds


class _Filters(dict[str, Callable[..., Any]]):
    """Filters, each of which counts as a step."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _counted_filter(name, function))


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja passes a context, environment or evaluation context first to functions with a mark.
    num_passed = int(getattr(function, "jinja_pass_arg", None) is not None)

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        budget = _active.get()
        if budget is None:
            return function(*arguments, **options)
        budget.step()
        budget.look_at_clock()
        values = list(arguments[num_passed:])
        for value in values:
            _no_namespace(value)
        if name in _WIDENING:
            _check_widths([*values[1:], *options.values()])
        if name == "format":
            _check_pattern(str(values[0]))
        if name == "replace" and len(values) >= 3:
            _take_replaced(budget, str(values[0]), str(values[1]), str(values[2]))
        if name == "join":
            values[0] = list(counted(values[0]))
            separator = values[1] if len(values) > 1 else options.get("d", "")
            _take_joined(budget, values[0], str(separator))
        return budget.weigh(function(*arguments[:num_passed], *values, **options))

    return call


class _Marked(NodeTransformer):
    """Replaces loops, joined texts and containers by calls that count them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call("counted", [node.iter], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._weighed(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return node if node.ctx != "load" else self._weighed(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._weighed(node, [pair.value for pair in node.items])

    def _weighed(self, node: nodes.Expr, items: Iterable[nodes.Node]) -> nodes.Node:
        is_constant = all(isinstance(item, nodes.Const) for item in items)
        self.generic_visit(node)
        return node if is_constant else _call("weighed", [node], node)


def _call(name: str, arguments: list[Any], of: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=of.lineno, environment=of.environment)
    return nodes.Call(
        function, arguments, [], None, None, lineno=of.lineno, environment=of.environment
    )


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of Transformers, with bounds inside `bounded`."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "-"})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"finalize": _printed} | options)
        filters, self.filters = self.filters, _Filters()
        for name, function in filters.items():
            self.filters[name] = function
        self.concat = _concat  # type: ignore[method-assign]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        marked: nodes.Template = _Marked().visit(parsed)
        return marked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operation on bounded values."""
        budget = _active.get()
        if budget is not None:
            budget.step()
            _check_operation(budget, operator, left, right)
        value = super().call_binop(context, operator, left, right)
        return value if budget is None else budget.weigh(value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: PYI063
        """Call a function with bounded arguments."""
        budget = _active.get()
        functions = (__self.counted, __self.joined, __self.weighed)
        if budget is None or any(__obj is function for function in functions):
            return super().call(__context, __obj, *args, **kwargs)
        budget.step()
        if isinstance(__obj, LoopContext):
            args = (counted(args[0]), *args[1:])
        if isinstance(__obj, type) and issubclass(__obj, Namespace):
            for value in (*args, *kwargs.values()):
                _no_namespace(value)
        elif not isinstance(__obj, LoopContext | Macro):
            args = _checked_call(budget, __obj, args, kwargs)
        value = super().call(__context, __obj, *args, **kwargs)
        return value if isinstance(value, Namespace) else budget.weigh(value)

    @staticmethod
    def counted(values: Any) -> Any:
        """Count the passes of a loop."""
        return values if _active.get() is None else counted(values)

    @staticmethod
    def joined(*values: Any) -> str:
        """Join values as text: the operator `~`."""
        budget = _active.get()
        if budget is not None:
            budget.step()
            for value in values:
                _no_namespace(value)
                if isinstance(value, _CONTAINERS):
                    budget.weigh(value)
        texts = [str(value) for value in values]
        if budget is not None:
            budget.take(sum(map(len, texts)))
        return "".join(texts)

    @staticmethod
    def weighed(value: Any) -> Any:
        """Count a container."""
        budget = _active.get()
        return value if budget is None else budget.weigh(value)


def counted(values: Iterable[Any]) -> Iterator[Any]:
    """Iterate, counting each pass as a step."""
    budget = _active.get()
    for value in values:
        if budget is not None:
            budget.step()
        yield value


@pass_context
def _printed(_: Any, value: Any) -> Any:
    """Check a value that `{{ }}` prints."""
    budget = _active.get()
    return value if budget is None or isinstance(value, str) else budget.weigh(value)


def _concat(texts: Iterable[str]) -> str:
    budget = _active.get()
    if budget is None:
        return "".join(texts)
    parts, num_chars = [], 0
    for text in texts:
        parts.append(text)
        num_chars += len(text)
        if num_chars > MAX_CHARS:
            budget.take(num_chars)
    budget.take(num_chars)
    return "".join(parts)


def _no_namespace(value: Any) -> None:
    if isinstance(value, Namespace):
        raise TemplateBoundError("a namespace inside another value, or as text")


def _check_operation(budget: Budget, operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for value, number in ((left, right), (right, left)):
            if isinstance(value, str | bytes | list | tuple) and isinstance(number, int):
                budget.take(len(value) * max(number, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if max(left.bit_length(), 1) * max(right, 1) > _MAX_BITS and abs(left) > 1:
            raise TemplateBoundError(f"a number of more than {_MAX_BITS:,} bits")
    elif operator == "%" and isinstance(left, str | bytes):
        _check_pattern(left if isinstance(left, str) else left.decode("latin-1"))
        for value in right if isinstance(right, tuple) else (right,):
            _no_namespace(value)
            budget.weigh(value)
    elif operator == "+" and isinstance(left, str | bytes | list | tuple):
        budget.take(len(left) + (len(right) if hasattr(right, "__len__") else 0))


def _checked_call(
    budget: Budget, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """Check the arguments of a function or method, and return them."""
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    owner: Any = getattr(method, "__self__", None)
    name = getattr(method, "__name__", "")
    if not isinstance(owner, (str, bytes, int, float)):
        if name == "generate_lorem_ipsum":
            _check_widths([*arguments, *options.values()], most=100)
        return arguments
    if name not in _SEARCHING:
        _check_widths([*arguments, *options.values()])
    if name in {"format", "format_map"}:
        _check_pattern(str(owner))
        for value in (*arguments, *options.values()):
            _no_namespace(value)
    elif name == "replace" and len(arguments) >= 2:
        _take_replaced(budget, owner, *arguments[:2])
    elif name == "expandtabs":
        size = arguments[0] if arguments else options.get("tabsize", 8)
        budget.take(len(str(owner)) * max(int(size), 1))
    elif name == "translate" and arguments and isinstance(arguments[0], dict):
        longest = max((len(v) for v in arguments[0].values() if isinstance(v, str)), default=1)
        budget.take(len(str(owner)) * max(longest, 1))
    elif name == "join" and arguments:
        items = list(counted(arguments[0]))
        _take_joined(budget, items, owner)
        return (items, *arguments[1:])
    return arguments


def _check_widths(values: Iterable[Any], most: int = MAX_WIDTH) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > most:
            raise TemplateBoundError(f"a width or count of more than {most:,}")


def _check_pattern(text: str) -> None:
    """Check a format: widths are digits in it, or arguments."""
    if len(text) > _MAX_PATTERN_CHARS or _WIDE.search(text):
        raise TemplateBoundError("a format with a computed width, or with one of five digits")


def _take_replaced(budget: Budget, text: Any, old: Any, new: Any) -> None:
    budget.take(max(len(text) + text.count(old) * (len(new) - len(old)), 0))


def _take_joined(budget: Budget, items: list[Any], separator: Any) -> None:
    for item in items:
        _no_namespace(item)
    num_chars = sum(len(item) for item in items if isinstance(item, str | bytes))
    budget.take(num_chars + len(separator) * max(len(items) - 1, 0))
