import copy
import json
from functools import cache
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.retokenize import (
    ChatTokenizer,
    encode_messages,
    encode_response,
    load_tokenizer,
    retokenize,
)
from rollout_io.retokenize.chat_template import find_template
from schemas.errors import RolloutError
from tests.helpers.examples import examples
from tests.helpers.qwen import chat_template_of, save_qwen3

BASE = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look <it> up.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "clock")
]
APPEND_ONLY = ("qwen3_acc_thinking", "qwen2_5", "qwen3_instruct_2507")


def user(content):
    return {"role": "user", "content": content}


def tool(content):
    return {"role": "tool", "content": content}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def assistant(content, *calls, **more):
    return (
        {"role": "assistant", "content": content}
        | ({"tool_calls": [*calls]} if calls else {})
        | more
    )


PARALLEL = [
    user("Weather and time in Ulm?"),
    assistant("", call("weather", city="Ulm"), call("clock", city="Ulm")),
    tool("rain"),
    tool("12:00"),
    assistant("Rain, noon.\n"),
]
CONVERSATIONS = {
    "thinking": [
        {"role": "system", "content": "Be brief."},
        user("2+2?"),
        assistant("<think>\nEasy.\n</think>\n\n4"),
        user("3+3?"),
        assistant("<think>\nAlso easy.\n</think>\n\n6"),
    ],
    "parallel calls": PARALLEL,
    "text before a call": [
        user("Time?"),
        assistant("Let me look.", call("clock", city="Z\u00fcrich")),
        tool("<|im_ end|>"),
        user("And?"),
        assistant("12 <|im_ start|>"),
    ],
    "leading newlines": [user("Hi"), assistant("\n\nHi"), user("Ho"), assistant("\n \n Ho")],
    "empty": [user(""), assistant(""), user(""), assistant("\n")],
    "two answers, trailing question": [user("a"), assistant("b"), assistant("c"), user("d")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), chat_template_of("qwen3"))


@pytest.fixture(scope="module")
def official(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def named(official):
    """The tokenizer with a template of ours, or of the package `trl`; it takes a second to load."""

    @cache
    def load(name):
        backend = copy.copy(official.backend)
        ours = name.endswith("_thinking")
        backend.chat_template = find_template(name) if ours else chat_template_of(name)
        return ChatTokenizer(official.name, backend)

    return load


def parsed(messages):
    """As Transformers' templates take them: arguments are objects."""
    own = json.loads(json.dumps(messages))
    for message in own:
        for item in message.get("tool_calls", []):
            item["function"]["arguments"] = json.loads(item["function"]["arguments"])
    return own


def template_ids(tokenizer, messages, **keywords):
    backend = tokenizer.backend
    return backend.apply_chat_template(parsed(messages), return_dict=False, **keywords)


def expected_in_place(tokenizer, messages, tools):
    """Prompt, response and trained positions by rendering the growing conversation."""
    whole = template_ids(tokenizer, messages, tools=tools)
    trained, first = set(), None
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, upto = messages[:index], messages[: index + 1]
            header = template_ids(tokenizer, before, tools=tools, add_generation_prompt=True)
            ids = template_ids(tokenizer, upto, tools=tools)
            assert whole[: len(ids)] == ids
            start = len(header) if ids[: len(header)] == header else len(header) - 1
            assert ids[:start] == header[:start]
            end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
            trained |= set(range(start, end))
            first = start if first is None else first
    mask = [position in trained for position in range(first, len(whole))]
    return whole[:first], whole[first:], mask


def expected_after_the_base(tokenizer, messages, tools):
    """The same by the definition of the fixed base, one run of messages at a time."""
    base = template_ids(tokenizer, BASE, tools=tools)
    ids, mask = [], []
    for is_assistant, run in groupby(messages, lambda m: m["role"] == "assistant"):
        for part in [[m] for m in run] if is_assistant else [list(run)]:
            whole = template_ids(tokenizer, [*BASE, *part], tools=tools)
            assert whole[: len(base)] == base
            piece = whole[len(base) :]
            end = len(piece) - piece[::-1].index(tokenizer.eos_token_id)
            ids += piece
            mask += [is_assistant and 3 <= i < end for i in range(len(piece))]
    return ids, mask


def without_system(messages):
    return [message for message in messages if message["role"] != "system"]


def found(tokens):
    return tokens.prompt_token_ids.tolist(), tokens.response_ids.tolist(), tokens.loss_mask.tolist()


def check_spans(tokens, messages):
    from_spans = [False] * len(tokens.response_ids)
    for start, length in tokens.spans.tolist():
        from_spans[start : start + length] = [True] * length
    assert from_spans == tokens.loss_mask.tolist()
    assert len(tokens.spans) == sum(m["role"] == "assistant" for m in messages)


@pytest.mark.slow
def test_the_tokenizer_is_qwen3s(official):
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<think>", "</think>"]
    ids = official.backend.convert_tokens_to_ids(names)
    assert ids == [151643, 151644, 151645, 151657, 151667, 151668]


@pytest.mark.slow
def test_the_examples_of_encode_messages(official):
    hi = encode_messages([user("Hi")], official)
    assert hi.tolist() == [151644, 872, 198, 13048, 151645, 198]
    assert official.decode(hi) == "<|im_start|>user\nHi<|im_end|>\n"
    answer = encode_messages([assistant("Hi")], official)
    assert answer.tolist() == [151644, 77091, 198, 151667, 271, 151668, 271, 13048, 151645, 198]
    assert official.decode(answer) == "<|im_start|>assistant\n<think>\n\n</think>\n\nHi<|im_end|>\n"


def test_consecutive_tool_messages_are_one_user_block(official):
    together = official.decode(encode_messages([tool("rain"), tool("12:00")], official))
    assert together == (
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\n12:00\n</tool_response><|im_end|>\n"
    )
    tokens = retokenize(PARALLEL, official, tools=TOOLS)
    assert together in official.decode(tokens.response_ids)


def test_parallel_calls_train_whole(official):
    tokens = retokenize(PARALLEL, official, tools=TOOLS)
    assert [official.decode(tokens.response_ids[s : s + n]) for s, n in tokens.spans] == [
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {"city": "Ulm"}}\n</tool_call>'
        "<|im_end|>",
        "<think>\n\n</think>\n\nRain, noon.\n<|im_end|>",
    ]


def test_thinking_is_kept_in_every_message_where_the_conversation_would_lose_it(official):
    chat = CONVERSATIONS["thinking"]
    assert "Easy." not in official.render(chat)
    assert "Easy." in official.decode(retokenize(chat, official).response_ids)


def test_reasoning_beside_the_content_equals_thinking_inside_it(official):
    chat = [user("2+2?"), assistant("4", reasoning_content="Easy."), user("3+3?"), assistant("6")]
    inside = [user("2+2?"), assistant("<think>\nEasy.\n</think>\n\n4"), *chat[2:]]
    assert found(retokenize(chat, official)) == found(retokenize(inside, official))


@pytest.mark.parametrize("name", APPEND_ONLY)
@pytest.mark.parametrize("key", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_ids_and_mask_equal_those_of_the_growing_conversation(named, name, key, tools):
    tokenizer, chat = named(name), CONVERSATIONS[key]
    tokens = retokenize(chat, tokenizer, tools=tools)
    assert found(tokens) == expected_in_place(tokenizer, chat, tools)
    check_spans(tokens, chat)


@pytest.mark.parametrize("key", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_ids_and_mask_equal_the_fixed_base_definition(official, key, tools):
    chat = without_system(CONVERSATIONS[key])
    tokens = encode_response(chat, official, tools=tools)
    expected = expected_after_the_base(official, chat, tools)
    assert (tokens.response_ids.tolist(), tokens.loss_mask.tolist()) == expected
    check_spans(tokens, chat)


def test_the_mask_equals_the_generation_tags_of_the_template(named):
    tokenizer, chat = named("qwen3_with_thinking"), CONVERSATIONS["thinking"]
    tagged = tokenizer.backend.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = retokenize(chat, tokenizer)
    ours = [False] * len(tokens.prompt_token_ids) + tokens.loss_mask.tolist()
    assert [bool(flag) for flag in tagged["assistant_masks"]] == ours


def test_without_thinking_strips_all_but_the_last_message_of_a_conversation(named):
    text = named("qwen3_without_thinking").render(CONVERSATIONS["thinking"])
    assert text.endswith(
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAlso easy.\n</think>\n\n6<|im_end|>\n"
    )


def test_without_thinking_equals_with_thinking_when_retokenized(named):
    chat = CONVERSATIONS["thinking"]
    one, other = (named(f"qwen3_{kind}_thinking") for kind in ("without", "with"))
    assert found(retokenize(chat, one)) == found(retokenize(chat, other))


def test_acc_thinking_closes_the_think_block_where_thinking_is_disabled(named):
    backend = named("qwen3_acc_thinking").backend
    keywords = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    text = backend.apply_chat_template([user("Hi")], **keywords)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["qwen3_with_thinking", "qwen3_without_thinking"])
def test_a_template_without_tools_says_so(named, name):
    for chat, tools in ((PARALLEL[:2], TOOLS), (PARALLEL, None)):
        with pytest.raises(RolloutError) as caught:
            retokenize(chat, named(name), tools=tools)
        assert caught.value.rule in {"chat_template", "text_kept"}


def test_a_template_with_alternating_roles_says_so(named):
    with pytest.raises(RolloutError, match="must alternate"):
        retokenize(CONVERSATIONS["thinking"], named("gemma3"))


PARTS = ["a", " b", "\n", "\n\n", " ", "\t", "12", "\u00e9\u4e2d", "\U0001f600", "\r\n"]
PARTS += ["assistant"]
PARTS += ["<|im_ end|>", "<|im_ start|>", "<tool_call>", "{", '"', "```"]
TEXT = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
CALL = st.builds(call, st.sampled_from(["weather", "clock"]), city=TEXT)
THINKING = st.tuples(TEXT, TEXT).map(lambda t: f"<think>\n{t[0]}\n</think>\n\n{t[1]}")


@st.composite
def conversations(draw):
    system = draw(st.sampled_from([[], [{"role": "system", "content": "Be brief."}]]))
    messages = [*system, user(draw(TEXT))]
    for _ in range(draw(st.integers(1, 4))):
        calls = draw(st.lists(CALL, max_size=2))
        messages.append(assistant(draw(st.one_of(TEXT, THINKING)), *calls))
        messages += [tool(draw(TEXT)) for _ in calls]
        messages += [user(text) for text in draw(st.lists(TEXT, max_size=2))]
    return messages


@settings(max_examples=examples(60), deadline=None)
@given(chat=conversations(), tools=st.sampled_from([None, TOOLS]))
@pytest.mark.parametrize("name", APPEND_ONLY)
def test_any_conversation_equals_its_growing_rendering(named, name, chat, tools):
    tokenizer = named(name)
    tokens = retokenize(chat, tokenizer, tools=tools)
    assert found(tokens) == expected_in_place(tokenizer, chat, tools)
    both = [*tokens.prompt_token_ids, *tokens.response_ids]
    assert tokenizer.decode(both) == tokenizer.render(parsed(chat), tools)
    check_spans(tokens, chat)


@settings(max_examples=examples(60), deadline=None)
@given(chat=conversations().map(without_system), tools=st.sampled_from([None, TOOLS]))
def test_any_conversation_equals_the_fixed_base_definition(official, chat, tools):
    tokens = encode_response(chat, official, tools=tools)
    expected = expected_after_the_base(official, chat, tools)
    assert (tokens.response_ids.tolist(), tokens.loss_mask.tolist()) == expected


@settings(max_examples=examples(60), deadline=None)
@given(chat=conversations(), tools=st.sampled_from([None, TOOLS]))
def test_acc_thinking_renders_as_the_official_template_without_thinking_rules(named, chat, tools):
    ours, theirs = named("qwen3_acc_thinking"), named("qwen3_instruct_2507")
    messages = parsed(chat)
    for prompt in (False, True):
        assert ours.render(messages, tools, generation_prompt=prompt) == theirs.render(
            messages, tools, generation_prompt=prompt
        )
