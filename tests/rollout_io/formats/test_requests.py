"""Messages become those of a request as the data of a program says."""

import pytest

from rollout_io.formats.base import noted
from rollout_io.formats.requests import Piece, Sends, sent


def said(role, content="", **fields):
    return {"role": role, "content": content} | fields


def calling(*names):
    return said("assistant", tool_calls=[{"id": name} for name in names])


def result(name):
    return said("tool", name, tool_call_id=name)


def contents(sends, *messages):
    pieces = [Piece(message, i) for i, message in enumerate(messages)]
    return [piece.message["content"] for piece in sent(pieces, sends, set())]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_call_gets_a_result_only_if_another_message_follows(is_first):
    sends = Sends(missing="none", is_missing_first=is_first)
    messages = [calling("a", "b"), result("a")]
    assert contents(sends, *messages) == ["", "a"]
    results = ["none", "a"] if is_first else ["a", "none"]
    assert contents(sends, *messages, said("user", "On.")) == ["", *results, "On."]


def test_results_that_come_late_or_twice_or_without_a_call_are_counted_once():
    messages = [calling("a"), result("a"), result("a"), result("b"), said("user"), result("a")]
    sends, seen = Sends(orphans="orphans"), set()
    with noted() as notes:
        for _ in range(2):
            pieces = sent([Piece(message, i) for i, message in enumerate(messages)], sends, seen)
    assert [piece.message["content"] for piece in pieces] == ["", "a", ""]
    assert notes == {"orphans": 3}


def test_messages_of_a_role_are_one_unless_one_is_alone_or_trains_and_the_other_does_not():
    one, other = said("user", "a"), said("user", "b")
    for piece, expected in (
        (Piece(other), ["a-b"]),
        (Piece(other, is_alone=True), ["a", "b"]),
        (Piece(other, is_given=True), ["a", "b"]),
    ):
        joined = sent([Piece(one), piece], Sends({"user": "-"}), set())
        assert [piece.message["content"] for piece in joined] == expected
    assert (one["content"], other["content"]) == ("a", "b")


def test_answers_are_one_if_thoughts_then_text_then_calls_are_in_order():
    thought = said("assistant", reasoning_content="Hm.")
    sends = Sends({"assistant": " "})
    assert contents(sends, thought, said("assistant", "a"), calling("c")) == ["a"]
    assert contents(sends, calling("c"), said("assistant", "a"), thought) == ["", "a", ""]


def test_media_of_results_are_sent_behind_the_last_result_of_an_answer():
    text, picture = {"type": "text", "text": "seen"}, {"type": "image", "source": {"data": "x"}}
    results = [said("tool", [text, picture]), said("tool", [picture]), said("tool", "plain")]
    sends = Sends(media_text="From tools:", textless="(see)")
    behind = [{"type": "text", "text": "From tools:"}, picture, picture]
    expected = ["", "seen", "(see)", "plain", behind, "On."]
    assert contents(sends, calling("a"), *results, said("user", "On.")) == expected
    assert contents(sends, calling("a"), *results) == expected[:-1]
    assert contents(Sends(), *results) == [result["content"] for result in results]
