"""How many examples a property test tries."""

from math import ceil

from hypothesis import settings


def examples(number: int) -> int:
    """A share of `number` in `make test`, all in `make test-all`: see the profiles in conftest.py."""
    return ceil(number * settings().max_examples / 100)
