"""A secret that is also a word of the API is replaced in texts, and the record stays readable."""

import json

import pyarrow as pa
import pytest

from rollout_io.redaction.literals import Literals
from rollout_io.redaction.values import WORDS
from tests.rollout_io.redaction.test_redact import redactor_of

SECRETS = ("assistant", "tool_calls", "ssistan", 'e": "assistant", "c', "json_schema", "max_tokens")


@pytest.mark.parametrize("secret", SECRETS)
def test_roles_types_and_names_of_fields_stay(secret):
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    request = {"messages": [message], "max_tokens": 5, "response_format": {"type": "json_schema"}}
    text = json.dumps(request).encode()
    assert redactor_of(secret.encode()).replacer.texts([text]) == [text]


def test_the_same_word_is_replaced_in_texts_arguments_and_other_fields():
    request = {
        "messages": [{"role": "assistant", "content": "it is assistant"}],
        "metadata": {"assistant": "assistant"},
        "arguments": json.dumps({"role": "assistant"}),
        "type": "xassistant",
    }
    (made,) = redactor_of(b"assistant").replacer.texts([json.dumps(request).encode()])
    gone = "[REDACTED_0]"
    assert json.loads(made) == {
        "messages": [{"role": "assistant", "content": f"it is {gone}"}],
        "metadata": {"assistant": gone},
        "arguments": json.dumps({"role": gone}),
        "type": f"x{gone}",
    }


def test_a_secret_that_contains_fields_is_replaced_between_them():
    text = b'{"a": ["type", {"k": "abcdefgh", "type": "function"}]}'
    (made,) = redactor_of(b'"k": "abcdefgh", "type": "function"', b"abcdefgh").replacer.texts(
        [text]
    )
    assert json.loads(made) == {"a": ["type", {"k": "[REDACTED_1]", "type": "function"}]}


def test_columns_of_few_words_keep_them_and_lose_other_secrets():
    rows = ["tool_calls", "a tool_calls", None]
    kind = pa.struct([("stop_reason", pa.string()), ("answer", pa.string())])
    table = pa.table(
        {
            "stop_reason": rows,
            "nested": pa.array([{"stop_reason": v, "answer": v} for v in rows], kind),
        }
    )
    replacer = redactor_of(b"tool_calls").replacer
    made = [replacer.column(table.column(name), name).to_pylist() for name in table.column_names]
    told, gone = ["tool_calls", "a [REDACTED_0]", None], ["[REDACTED_0]", "a [REDACTED_0]", None]
    assert made[0] == told
    assert [each["stop_reason"] for each in made[1]] == told
    assert [each["answer"] for each in made[1]] == gone


@pytest.mark.parametrize("depth", [1, 2])
def test_arguments_remain_json_if_a_number_is_a_secret(depth):
    arguments = '{"pin": 31415926535897, "of":31415926535897}'
    for _ in range(depth):
        arguments = json.dumps({"arguments": arguments})
    (made,) = redactor_of(b"31415926535897").replacer.texts([arguments.encode()])
    for _ in range(depth):
        made = json.loads(made)["arguments"]
    assert json.loads(made) == {"pin": "[REDACTED_0]", "of": "[REDACTED_0]"}


def test_a_word_of_the_protocol_is_not_inside_of_escaped_json():
    text = json.dumps({"x": json.dumps(dict.fromkeys(sorted(WORDS), 1))}).encode()
    secrets = tuple(f'{word}\\"'.encode() for word in sorted(WORDS) if len(word) > 7)
    (made,) = redactor_of(*secrets).replacer.texts([text])
    assert not any(Literals(secrets).spans([made]))
