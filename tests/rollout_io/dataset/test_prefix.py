"""`find_parents` against its definition, and how its work grows with the steps of a trajectory."""

import sys
from itertools import accumulate, chain, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.dataset.prefix_layout import find_parents
from schemas.ragged import Ragged, offsets_of
from tests.helpers.examples import examples

TOKENS = st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=4)


@st.composite
def trajectories(draw, max_steps=12):
    """Steps (prompt, response) that go on from any token of an earlier one, or from nothing."""
    steps, known = [], [[]]
    for _ in range(draw(st.integers(1, max_steps))):
        before = draw(st.sampled_from(known))
        prompt = before[: draw(st.integers(0, len(before)))] + draw(TOKENS)
        response = draw(TOKENS)
        steps.append((prompt, response))
        known += [prompt, prompt + response]
    return steps


def literal_parents(steps):
    """Of the earlier steps that share the longest prefix with each prompt, the latest."""
    for i, (prompt, _) in enumerate(steps):
        shared = [num_common(p + r, prompt) for p, r in steps[:i]]
        longest = max(shared, default=0)
        yield (max(j for j in range(i) if shared[j] == longest), longest) if longest else (-1, 0)


def num_common(a, b):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def parents(*several):
    """`find_parents` of one trajectory after the other."""
    parent, shared = find_parents(*columns(*several))
    return list(zip(parent.tolist(), shared.tolist(), strict=True))


def columns(*several):
    """Prompts, responses and first rows of trajectories."""
    starts = [0, *accumulate(map(len, several))][: len(several)]
    sides = zip(*(step for one in several for step in one), strict=True)
    prompts, responses = map(ragged, sides) if several else (ragged([]), ragged([]))
    return prompts, responses, np.array(starts, np.int64)


def ragged(rows):
    values = np.array(list(chain.from_iterable(rows)), np.int32)
    offsets = offsets_of(np.array([len(row) for row in rows], np.int64))
    return Ragged(values, offsets, np.ones(len(rows), np.bool_))


@given(st.lists(trajectories(), max_size=3))
@settings(deadline=None, max_examples=examples(150))
def test_parents_are_those_of_the_definition(several):
    wanted = [found for steps in several for found in literal_parents(steps)]
    assert parents(*several) == wanted


SPINE = list(range(100, 200))
SHAPES = {
    "star": lambda n: [([*SPINE, i], [i]) for i in range(n)],
    "caterpillar": lambda n: [([*SPINE[: i * 37 % 100], i], [i]) for i in range(n)],
    "chain": lambda n: [(SPINE[: i % 100], [SPINE[i % 100]]) for i in range(n)],
    "two chains": lambda n: [([i % 2, *SPINE[: i % 100]], []) for i in range(n)],
    "repeated token": lambda n: [([7] * (i * 29 % 83), [7] * (i % 3)) for i in range(n)],
    "same prompt": lambda n: [(SPINE, [i * 31 % 7, i % 5]) for i in range(n)],
    "same step": lambda n: [(SPINE, [1]) for _ in range(n)],
    "binary tree": lambda n: [([int(b) for b in f"{i % 64:06b}"[::-1]], []) for i in range(n)],
    "last token changed": lambda n: [(SPINE[: i % 100], [i]) for i in range(n)],
    "nothing shared": lambda n: [([i], [0]) for i in range(n)],
    "no tokens": lambda n: [([], []) for _ in range(n)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_parents_in_regular_shapes_are_those_of_the_definition(shape):
    steps = SHAPES[shape](120)
    assert parents(steps) == list(literal_parents(steps))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_calls_that_finding_parents_takes_grow_as_the_steps(shape):
    few, many = (num_calls(find_parents, *columns(SHAPES[shape](n))) for n in (128, 1024))
    assert many < 8 * 2 * few


def num_calls(function, *arguments):
    """Calls of functions, Python's and built-in ones, that a call makes."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls
