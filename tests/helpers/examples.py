"""How many examples a property test tries."""

from math import ceil

from hypothesis import settings


def examples(number: int) -> int:
    """A quarter of `number` on every change, all in `make test-nightly`: see the profiles in conftest.py."""
    return ceil(number * settings().max_examples / 100)
