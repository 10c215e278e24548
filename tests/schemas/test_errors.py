"""Shortened reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import shortened

TEXT = st.text("ab ([{}])", max_size=30)


@given(TEXT, st.integers(5, 40))
def test_a_shortened_text_fits_and_is_a_beginning(text: str, num_chars: int) -> None:
    found = shortened(text, num_chars)
    assert len(found) <= num_chars
    assert found == text or text.startswith(found.removesuffix("..."))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("found [1, 2, 3] where (a b) was expected", "found [1, 2, 3] where..."),
        ("found (a longer remark in brackets)", "found..."),
        ("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]", "[1, 2, 3, 4, 5, 6, 7, 8,..."),
    ],
)
def test_no_text_ends_in_the_middle_of_a_bracket(text: str, found: str) -> None:
    assert shortened(text, 27) == found
