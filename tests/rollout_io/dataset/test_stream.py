"""A stream is what a function in a process of its own sends, until it returns, fails or dies."""

from functools import partial

import pytest

from rollout_io.dataset.worker_processes import stream
from schemas.errors import RolloutError
from tests.helpers.worker_helpers import send_and_die, send_and_fail, send_numbers

pytestmark = pytest.mark.slow  # starts processes


def test_a_stream_yields_what_is_sent_in_order():
    assert list(stream(partial(send_numbers, 5))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("function", "words"), [(send_and_fail, r"\[some_rule\]"), (send_and_die, r"SIGKILL")]
)
def test_what_was_sent_before_the_end_arrives(function, words):
    sent = stream(function)
    assert next(sent) == 0
    with pytest.raises(RolloutError, match=words):
        next(sent)


def test_a_closed_stream_ends_its_process():
    sent = stream(partial(send_numbers, 10**9))
    assert next(sent) == 0
    sent.close()
