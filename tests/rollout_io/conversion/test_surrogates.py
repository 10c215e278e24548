r"""Lone surrogates, which JavaScript writes as "\ud83d", cost nothing but their own character."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io import convert, read
from rollout_io.conversion.plan import Keywords
from rollout_io.formats.parsing.content import canonical_json
from rollout_io.formats.parsing.jsonl import SURROGATES, decoded, without_lone_surrogates
from schemas.errors import RolloutError

DECODER = msgspec.json.Decoder()
LONE = "cut \ud83d"


@given(st.lists(st.sampled_from(["\ud83d", "\ude00", "\\", "ud83d", '"', "\n", "x", "\u00e9"])))
def test_lone_surrogates_become_u_fffd_and_nothing_else_changes(parts):
    text = "".join(parts)
    content = json.dumps({"k": [text, text]}).encode()
    (first, second) = decoded(DECODER, content)["k"]
    assert first == second
    pairs = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert first == "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in pairs)
    assert len(without_lone_surrogates(content)) == len(content)


def test_arguments_that_are_json_inside_a_string_are_read_in_the_same_way():
    assert canonical_json(json.dumps({"a": LONE})) == '{"a":"cut \ufffd"}'


def openai(*texts):
    return "".join(
        json.dumps({"id": f"{i}", "messages": [said("user", t), said("assistant", "ok")]}) + "\n"
        for i, t in enumerate(texts)
    )


def said(role, text):
    return {"role": role, "content": text}


def gemini(*texts):
    messages = [{"type": "user", "content": t} for t in texts]
    return json.dumps(
        {
            "sessionId": "s",
            "projectHash": "p",
            "messages": [*messages, {"type": "gemini", "content": "ok"}],
        }
    )


def codex(*texts):
    items = [said("user", [{"type": "input_text", "text": t}]) for t in texts]
    items += [said("assistant", [{"type": "output_text", "text": "ok"}])]
    lines = [
        {"timestamp": "t", "type": "response_item", "payload": {"type": "message"} | i}
        for i in items
    ]
    return "\n".join(map(json.dumps, lines))


@pytest.mark.model
@pytest.mark.parametrize(
    ("write", "name"), [(openai, "a.jsonl"), (gemini, "a.json"), (codex, "a.jsonl")]
)
def test_a_log_with_a_lone_surrogate_is_recognized_and_read(write, name, tmp_path, smollm2_dir):
    (tmp_path / name).write_text(write(LONE, "whole"))
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    done = convert([str(tmp_path / name)], tmp_path / "ds", **choices).summary
    assert (done.num_rejected, done.notes[SURROGATES]) == (0, 1)
    messages = "".join(read(tmp_path / "ds")["messages"].to_pylist())
    assert "cut \ufffd" in messages
    assert "whole" in messages


def test_rewards_are_not_given_to_a_name_that_was_changed(tmp_path):
    call = {
        "prompt_token_ids": [1],
        "choices": [{"token_ids": [2], "message": said("assistant", "x")}],
    }
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"session": "a\ufffd/0", "request": {}, "response": call})
    )
    (tmp_path / "r.jsonl").write_text(json.dumps({"session": "a\ud800/0", "reward": 1.0}))
    with pytest.raises(RolloutError) as caught:
        convert([str(tmp_path / "a.jsonl")], tmp_path / "ds", rewards=str(tmp_path / "r.jsonl"))
    assert caught.value.rule == "json_line"
    assert "lone surrogate" in str(caught.value)


def test_json_that_no_format_can_read_is_named_before_the_format(tmp_path):
    line = '{"session": "w/0", "request": {}, "response": {"logprob": -Infinity}}'
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(RolloutError) as caught:
        convert([str(tmp_path / "a.jsonl")], tmp_path / "ds")
    assert (caught.value.rule, caught.value.where) == ("json_line", f"{tmp_path}/a.jsonl:1")
    assert "neither NaN" in caught.value.hint
