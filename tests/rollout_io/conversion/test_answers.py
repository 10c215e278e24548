"""What of a logged conversation trains."""

import pytest

from rollout_io.conversion.text import Retokenizer, with_answers, with_tokens
from rollout_io.formats.base import Conversation, Trajectory
from schemas.errors import RolloutError
from schemas.messages import is_answer

CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
LONG = "a long answer, which no other call of the model would give word for word"
USER, TOOL = {"role": "user", "content": "q"}, {"role": "tool", "content": "out"}


def said(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def conversation(*messages, num_given=0):
    return Conversation(source="a:1", messages=list(messages), num_given=num_given)


def cut(*conversations, **fields):
    return with_answers(Trajectory(steps=conversations, **fields))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (said("x"), True),
        (said("", tool_calls=[CALL]), True),
        (said("", reasoning_content="why"), True),
        (said(""), False),
        (said(None, tool_calls=[]), False),
        (USER, False),
    ],
)
def test_an_answer_says_something(message, expected):
    assert is_answer(message) is expected


@pytest.mark.parametrize("rest", [[TOOL], [USER, USER], [said("")], [TOOL, said(""), USER]])
def test_messages_after_the_last_answer_are_left_out(rest):
    (step,) = cut(conversation(USER, said("a"), *rest))
    assert step.messages == [USER, said("a")]


def test_a_conversation_without_an_answer_is_left_out_beside_others():
    with_answer = conversation(USER, said("a"))
    assert cut(conversation(USER, said("")), with_answer)[0].messages == with_answer.messages
    with pytest.raises(RolloutError, match=r"a:1.*\[no_calls\]"):
        cut(conversation(USER, said("")), conversation(USER))
    assert cut(conversation(USER, said("")), error="timeout") == []


@pytest.mark.model
def test_an_empty_answer_does_not_train(smollm2_dir):
    chat = [USER, said(""), USER, said("a"), USER, said(""), USER, said("b"), TOOL]
    (step,) = with_tokens(
        Trajectory(steps=[conversation(*chat)]), Retokenizer(directory=str(smollm2_dir))
    )
    decode = Retokenizer(directory=str(smollm2_dir)).tokenizer.decode
    assert [decode(step.response_ids[s : s + n]) for s, n in step.spans] == [
        "a<|im_end|>",
        "b<|im_end|>",
    ]
    assert decode(step.response_ids[step.loss_mask]) == "a<|im_end|>b<|im_end|>"
    assert decode(step.prompt_token_ids).count("<|im_start|>assistant") == 2


@pytest.mark.parametrize("reply", [said(LONG), said("", tool_calls=[CALL])])
def test_an_answer_in_its_own_prompt_is_refused(reply):
    recorded_after = conversation(USER, reply, TOOL, reply, num_given=3)
    with pytest.raises(RolloutError, match=r"a:1.*\[response_in_prompt\]"):
        cut(recorded_after)
    first, again = conversation(USER, reply), recorded_after
    assert len(cut(first, again)) == 2


@pytest.mark.parametrize(
    ("given", "reply"),
    [
        ([USER, said("yes"), USER], "yes"),
        ([USER, said(LONG + "."), USER], LONG),
        ([USER, said(LONG), USER, said("no"), USER], LONG),
    ],
)
def test_an_example_that_is_short_or_not_the_last_is_no_answer_in_its_own_prompt(given, reply):
    assert len(cut(conversation(*given, said(reply), num_given=len(given)))) == 1
