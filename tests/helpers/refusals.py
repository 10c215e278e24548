"""Assertions about errors, by their fields: the sentences are quoted beside their rules alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from schemas.errors import RolloutError


@contextmanager
def refused(
    rule: str,
    *,
    where: str = "",
    got: str = "",
    expected: str = "",
    hint: str = "",
    kind: type[RolloutError] = RolloutError,
) -> Iterator[None]:
    """Expect an error of a rule whose fields contain these words."""
    with pytest.raises(kind) as caught:
        yield
    assert_error(caught.value, rule, where=where, got=got, expected=expected, hint=hint)


def assert_error(error: RolloutError, rule: str, **words: str) -> None:
    """Assert the rule of an error, and words that its fields contain."""
    fields = error.fields()
    assert error.rule == rule, error
    assert [name for name, text in words.items() if text not in (fields[name] or "")] == [], fields
