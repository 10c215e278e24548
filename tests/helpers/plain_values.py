"""What plain readers of logs are made of: rows as they must be, values that are checked."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

INT32_MAX = 2**31 - 1


class Plain(NamedTuple):
    """A row: ids, the mask, log-probabilities and what the step itself earned."""

    prompt: list
    response: list
    mask: list | None = None
    logprobs: list | None = None
    reward: float | None = None


class Spoken(NamedTuple):
    """A row of text: all of it, and the parts that the model wrote."""

    text: str
    answers: list | None = None


class Expected(NamedTuple):
    """The rows of a trajectory, in order, and its outcome."""

    steps: list
    outcome: float | None = None
    names: str | None = None
    """The trajectory's id, where the format states it whole."""


class NotCompared(Exception):
    """The format leaves more than one reading, or this reader does not know the record's shape."""


def ids(value):
    """A list of token ids, not empty; numbers without a fraction are whole."""
    assert isinstance(value, list)
    assert value
    for i in value:
        assert type(i) in {int, float}
        assert 0 <= i <= INT32_MAX
        assert i == int(i)
    return [int(i) for i in value]


def floats(value, num):
    """Log-probabilities; None where the log has none."""
    if value is None:
        return None
    assert isinstance(value, list)
    assert len(value) == num
    for number in value:
        assert type(number) in {int, float}
        assert math.isfinite(number)
    return value


def flags(value, num):
    """A mask of truth values, or of 0 and 1."""
    if value is None:
        return None
    assert isinstance(value, list)
    assert len(value) == num
    for flag in value:
        assert flag in {True, False}
    return [bool(flag) for flag in value]


def number(value):
    """A reward; None where it is unknown."""
    assert value is None or type(value) in {int, float}
    assert value is None or math.isfinite(value)
    return None if value is None else float(value)


def record_at(source, pattern=r"(.*):(\d+)(?:\[(\d+)\])?(?:, .*)?"):
    """The JSON line that a source names, or the element of its list, and the path of its file."""
    path, line, *element = re.fullmatch(pattern, source, re.DOTALL).groups()
    record = json.loads(Path(path).read_bytes().split(b"\n")[int(line) - 1])
    return record[int(element[0])] if element and element[0] else record, path


def all_lines(path):
    """The JSON lines of a file; broken ones are left out."""
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def document_at(source):
    """The JSON document that a source names."""
    path = source.partition(", ")[0]
    return json.loads(Path(path).read_bytes())
