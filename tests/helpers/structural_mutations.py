"""Damage to the tree of a log: what a harness, a converter or a person gets wrong in one field.

`mutated(tree, rng)` is a copy of a JSON-like tree with one field wrong, and what was done to it;
`encoded(tree, rng)` is its JSON. Equal generators, equal damage.
"""

import copy
import json
import random
import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

TWICE = "\x00twice"
"""Ends a key that is in the JSON text without it: the key is there twice."""

DEEP = "\x00deep"
NUM_DEEP = 3000
NUMBERS = [
    *(0, 1, -1, 2, -0.0, 0.5, 1.5, 7.0, 1e308, -1e308, 5e-324, -9999.0, -9999, 49152, 2**31 - 1),
    *(2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, 1e39, -1e39),
    *(float("nan"), float("inf"), float("-inf")),
]
TEXTS = ["", " ", "x", "0", "7", "null", "true", "[1, 2]", "{}", "\ud800", "\udc00\ud800", "\x00"]
TEXTS += ["e\u0301", "\u00e9", "\ufb01", "\u212b", "\u2028", "\ufeff", "<|im_end|>\n", "a\nb"]
OTHERS = [None, True, False, 0, 1.5, "x", [], {}, [[]], [None], {"a": None}, DEEP]
ROLES = ["system", "user", "assistant", "tool", "developer", "function", "agent", "model", "", "x"]
ROLE_KEYS = {"role", "source", "type", "agent", "event", "event_type", "status"}
ARGUMENT_KEYS = {"arguments", "args", "input"}
BROKEN_JSON = [
    '{"a": 1',
    "{'a': 1}",
    "[1]",
    "1",
    '"x"',
    "null",
    "",
    "{}",
    '{"a": 1} ',
    '{"a": 1.0}',
]
TIME_KEYS = {"time", "timestamp", "created_at", "created", "started_at", "finished_at"}


class NotApplicable(Exception):
    """The node is none that can be changed in this way."""


def mutated(tree, rng):
    """A copy of a tree with one field wrong, and the name and path of the change."""
    while True:
        changed = copy.deepcopy(tree)
        paths = _paths(changed)
        if not paths:
            return changed, "nothing"
        path = _pick(paths, rng)
        at = _At(changed, paths, path, rng)
        change = rng.choice(_changes_of(at.holder, at.key))
        try:
            change(at)
        except NotApplicable:
            continue
        where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
        return changed, f"{change.__name__[1:]} at {where}"


def encoded(tree, rng):
    """JSON of a tree: with or without escapes, repeated keys and deep nests as they are meant."""
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    text = text.replace(f"{json.dumps(TWICE)[1:-1]}", "")
    text = text.replace(json.dumps(DEEP), "[" * NUM_DEEP + "]" * NUM_DEEP)
    return text.encode(errors="surrogatepass")


@dataclass
class _At:
    """A node of a tree, and what may be needed to change it."""

    root: Any
    paths: dict
    path: tuple
    rng: random.Random

    @property
    def holder(self):
        """The list or object that it is in."""
        return _at(self.root, self.path[:-1])

    @property
    def key(self):
        """Its name or index there."""
        return self.path[-1]

    @property
    def value(self):
        """The node itself."""
        return self.holder[self.key]

    @value.setter
    def value(self, value):
        self.holder[self.key] = value

    def other(self):
        """The holder and key of another node of the same field, elsewhere."""
        same = [p for p in self.paths[_field(self.path)] if p != self.path]
        if not same:
            raise NotApplicable
        path = self.rng.choice(same)
        return _at(self.root, path[:-1]), path[-1]


def _field(path):
    return tuple("*" if isinstance(key, int) else key for key in path)


def _paths(tree):
    """Paths of all nodes by field; of long lists the first, some within and the last."""
    found, stack = {}, [()]
    while stack:
        path = stack.pop()
        value = _at(tree, path)
        if path:
            found.setdefault(_field(path), []).append(path)
        if isinstance(value, dict):
            stack += [(*path, key) for key in value]
        elif isinstance(value, list):
            size = len(value)
            indices = (
                range(size)
                if size <= 40
                else sorted({*range(20), size // 2, *range(size - 5, size)})
            )
            stack += [(*path, index) for index in indices]
    return found


def _pick(paths, rng):
    """Half of the time any field is as likely as another, half of the time fields near the root are."""
    fields = sorted(paths, key=repr)
    if rng.random() < 0.5:
        depth = rng.choice(sorted({len(field) for field in fields}))
        fields = [field for field in fields if len(field) == depth]
    return rng.choice(paths[rng.choice(fields)])


def _at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def _changes_of(holder, key):
    """What may go wrong with a node, by what it is."""
    value = holder[key]
    changes = [_drop, _replace, _retype, _nest, _copy_other, _swap_other, _insert_other]
    if isinstance(holder, dict):
        changes += [_repeat_key, _rename_key]
    else:
        changes += [_swap_neighbours, _repeat, _move]
    if isinstance(value, list):
        changes += [_shorten, _shorten, _lengthen, _lengthen, _reverse, _change_inner, _clear]
    if isinstance(value, dict):
        changes += [_clear]
    if isinstance(value, int | float) and not isinstance(value, bool):
        changes += [_number, _number, _number, _shift_number]
    if isinstance(value, str):
        changes += [_text, _text, _normalise, _pad]
    if key in ROLE_KEYS:
        changes += [_role] * 8
    if key in ARGUMENT_KEYS:
        changes += [_arguments] * 8
    if key in TIME_KEYS:
        changes += [_time] * 8
    return changes


def _drop(at):
    del at.holder[at.key]


def _replace(at):
    at.value = copy.deepcopy(at.rng.choice(OTHERS))


def _retype(at):
    """The same value as another type has it."""
    value = at.value
    if isinstance(value, bool):
        made = [int(value), str(value).lower(), float(value)]
    elif isinstance(value, int):
        made = [str(value), [value], value != 0, float(min(value, 2**60))]
    elif isinstance(value, float):
        made = [str(value), [value], value != 0, int(value) if abs(value) < 1e300 else 0]
    elif isinstance(value, str):
        made = [[value], {"text": value}, {"value": value}, [{"type": "text", "text": value}]]
        made += [int(value)] if value.isascii() and value.isdigit() and len(value) < 99 else []
    elif isinstance(value, list):
        made = [json.dumps(value), {str(i): item for i, item in enumerate(value)}]
        made += [value[0]] if value else []
    elif isinstance(value, dict):
        made = [json.dumps(value), list(value.values()), [value], list(value.items())]
    else:
        made = ["null", "None", [], {}, 0, ""]
    at.value = at.rng.choice(made)


def _nest(at):
    at.value = [at.value]


def _copy_other(at):
    other, name = at.other()
    at.value = copy.deepcopy(other[name])


def _swap_other(at):
    other, name = at.other()
    at.value, other[name] = copy.deepcopy(other[name]), copy.deepcopy(at.value)


def _insert_other(at):
    """Elements of another list of the same field come after this one's."""
    other, name = at.other()
    if not isinstance(at.value, list) or not isinstance(other[name], list):
        raise NotApplicable
    at.value = [*at.value, *copy.deepcopy(other[name])]


def _repeat_key(at):
    """The key is in the text twice; the second one is what counts."""
    value = at.holder.pop(at.key)
    second = copy.deepcopy(at.rng.choice([value, *OTHERS]))
    first, second = at.rng.choice([(value, second), (second, value)])
    at.holder[at.key + TWICE], at.value = first, second


def _rename_key(at):
    name = at.rng.choice(
        [
            f"{at.key}x",
            f"_{at.key}",
            at.key.upper(),
            at.key[:-1],
            unicodedata.normalize("NFD", f"{at.key}é"),
        ]
    )
    if name in at.holder:
        raise NotApplicable
    at.holder[name] = at.holder.pop(at.key)


def _swap_neighbours(at):
    if at.key + 1 >= len(at.holder):
        raise NotApplicable
    at.value, at.holder[at.key + 1] = at.holder[at.key + 1], at.value


def _repeat(at):
    at.holder.insert(at.key, copy.deepcopy(at.value))


def _move(at):
    at.holder.insert(at.rng.randrange(len(at.holder)), at.holder.pop(at.key))


def _shorten(at):
    if not at.value:
        raise NotApplicable
    del at.value[at.rng.choice([0, -1])]


def _lengthen(at):
    value = at.value
    value.insert(
        at.rng.choice([0, len(value)]), copy.deepcopy(at.rng.choice([*(value or [0]), None]))
    )


def _reverse(at):
    at.value.reverse()


def _clear(at):
    at.value = type(at.value)()


def _change_inner(at):
    if not at.value:
        raise NotApplicable
    at.value[at.rng.randrange(len(at.value))] = copy.deepcopy(at.rng.choice([*OTHERS, *NUMBERS]))


def _number(at):
    at.value = at.rng.choice(NUMBERS)


def _shift_number(at):
    value = at.value
    at.value = at.rng.choice([value + 1, value - 1, -value])


def _text(at):
    at.value = at.rng.choice(TEXTS)


def _normalise(at):
    value = at.value if not at.value.isascii() else f"{at.value}é"
    at.value = unicodedata.normalize(at.rng.choice(["NFC", "NFD", "NFKC"]), value)


def _pad(at):
    value = at.value
    at.value = at.rng.choice(
        [f" {value}", f"{value}\n", value.upper(), value + at.rng.choice(TEXTS)]
    )


def _role(at):
    at.value = at.rng.choice(ROLES)


def _arguments(at):
    value = at.value
    if isinstance(value, str) and at.rng.random() < 0.5:
        try:
            at.value = json.loads(value)
        except ValueError:
            raise NotApplicable from None
    elif isinstance(value, dict) and at.rng.random() < 0.5:
        at.value = json.dumps(value)
    else:
        at.value = at.rng.choice([*BROKEN_JSON, None, [], {"a": {"b": [1, "é", None]}}])


def _time(at):
    value = at.value
    if isinstance(value, str):
        found = re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", value)
        moved = (
            datetime.fromisoformat(found[0]) + timedelta(days=at.rng.choice([-9, 9]))
            if found
            else None
        )
        at.value = at.rng.choice(
            [moved.isoformat() if moved else "yesterday", 1795269243.0, "", None]
        )
    elif isinstance(value, int | float):
        at.value = at.rng.choice(
            [0, -1, value * 1000, value + 1e6, value - 1e6, str(value), None, 1e308]
        )
    else:
        raise NotApplicable
