"""A chat template that drops a part of a conversation is refused by name."""

import json

import pytest

from rollout_io import read_metadata
from rollout_io.cli.main import run
from rollout_io.retokenize import load_tokenizer, retokenize
from rollout_io.retokenize.chat_template import TEMPLATES
from schemas.errors import RolloutError

pytestmark = pytest.mark.model

USER = {"role": "user", "content": "q"}
KEPT = "use --chat-template chatml_tools_thinking, which keeps it"
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(content, *calls, **fields):
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


@pytest.fixture(scope="module")
def smol(smollm2_dir):
    return load_tokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def keeps_all(smollm2_dir):
    return load_tokenizer(smollm2_dir, "chatml_tools_thinking")


def template(folder, text, condition=""):
    """A chat template that renders messages in this way, as a file."""
    file = folder / "template.jinja"
    file.write_text(
        f"{{% for m in messages {condition} %}}{text}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return str(file)


PLAIN = "<|im_start|>{{ m.role }}\n{{ m.content }}"


@pytest.fixture
def names_only(smollm2_dir, tmp_path):
    """Renders the name of the first call alone."""
    name = "{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]{% endif %}"
    return load_tokenizer(smollm2_dir, template(tmp_path, PLAIN + name))


def refusal(messages, tokenizer, **keywords):
    with pytest.raises(RolloutError) as caught:
        retokenize(messages, tokenizer, where="a:1", **keywords)
    assert caught.value.rule == "text_kept"
    return caught.value


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (said("I will search now", call("search", q="zebra crossing")), "name 'search' of call 1"),
        (said("Executing bash", call("bash", cmd="ls")), "name 'bash' of call 1"),
        (said("delete", call("delete", id=1, force=True)), "name 'delete' of call 1"),
        (said("4 = 2 + 2", reasoning_content="2 + 2"), "the reasoning '2 + 2'"),
    ],
)
def test_a_call_or_a_thought_whose_words_are_in_the_content_is_dropped_all_the_same(
    smol, answer, part
):
    error = refusal([USER, answer], smol)
    assert part in error.got
    assert (error.where, error.hint) == ("a:1, message 1", KEPT)


@pytest.mark.parametrize(
    ("calls", "part"),
    [
        ([call("search", q="zebra")], "argument 'q' of 'search', call 1 of 1"),
        ([call("delete", id=1, force=True)], "argument 'id' of 'delete', call 1 of 1"),
        ([call("now"), call("now")], "name 'now' of call 2 of 2"),
    ],
)
def test_each_call_is_kept_with_each_of_its_arguments(names_only, calls, part):
    assert part in refusal([USER, said("zebra", *calls)], names_only).got


def test_what_a_prompt_lacks_is_named_too(smol, smollm2_dir, tmp_path):
    assert "definitions of the tools" in refusal([USER, said("a")], smol, tools=TOOLS).got
    shown = [USER, said("", call("ls", path="/")), {"role": "tool", "content": "x"}]
    error = refusal([*shown, said("a")], smol, num_given=3)
    assert ("name 'ls'" in error.got, error.where) == (True, "a:1, message 1")
    file = template(tmp_path, PLAIN, "if m.role != 'system'")
    system = {"role": "system", "content": "Be brief."}
    error = refusal([system, USER, said("a")], load_tokenizer(smollm2_dir, file))
    assert "the system message's text 'Be brief.'" in error.got


@pytest.mark.parametrize(
    ("text", "result", "part"),
    [
        (PLAIN.replace("m.role", "'user' if m.role == 'tool' else m.role"), "x", "role of a tool"),
        *(
            (PLAIN.replace("m.content", "m.content if m.role != 'tool'"), text, f"text '{text}'")
            for text in ("stripes", USER["content"])
        ),
        (PLAIN.replace("m.content", "m.content[:m.role | length]"), "stripes", "text 'stripes'"),
    ],
)
def test_a_tool_message_without_its_role_or_its_text_is_named(
    text, result, part, smollm2_dir, tmp_path
):
    tokenizer = load_tokenizer(smollm2_dir, template(tmp_path, text))
    chat = [USER, said("a"), {"role": "tool", "content": result}, said("b")]
    error = refusal(chat, tokenizer)
    assert (part in error.got, error.where) == (True, "a:1, message 2")


def test_the_bundled_template_keeps_every_part(keeps_all):
    chat = [
        {"role": "system", "content": "Be brief."},
        USER,
        said("Look.", call("search", q='say "zebra"\n', n=1.5), reasoning_content="Why not?"),
        {"role": "tool", "content": "stripes"},
        {"role": "tool", "content": "hooves"},
        said("", call("delete", id=1, force=None), call("now")),
    ]
    tokens = retokenize(chat, keeps_all, tools=TOOLS)
    text = keeps_all.decode([*tokens.prompt_token_ids, *tokens.response_ids])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert text.endswith(
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nWhy not?\n</think>\n\n"
        'Look.\n<tool_call>\n{"name": "search", "arguments": {"q": "say \\"zebra\\"\\n", "n": 1.5}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nstripes\n</tool_response>\n"
        "<tool_response>\nhooves\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "delete", "arguments": {"id": 1, "force": null}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_bundled_template_adds_text_to_a_plain_conversation(smollm2_dir, name):
    tokenizer = load_tokenizer(smollm2_dir, name)
    tokens = retokenize([USER, {"role": "assistant", "content": "a"}], tokenizer)
    assert tokenizer.decode(tokens.prompt_token_ids) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [tokenizer.added_text(system=s) for s in (False, True)] == ["", ""]


def test_the_text_that_a_template_adds_is_known(smol):
    text = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert [smol.added_text(system=s) for s in (False, True)] == [text, ""]


def test_the_text_that_a_template_adds_is_reported_and_kept_in_the_history(
    smollm2_dir, tmp_path, capsys
):
    log, out = tmp_path / "log.jsonl", tmp_path / "ds"
    log.write_text(json.dumps({"messages": [USER, {"role": "assistant", "content": "a"}]}))
    options = ["--format", "openai_messages", "--tokenizer", str(smollm2_dir)]
    assert run(["convert", str(log), *options, "--out", str(out)]) == 0
    added = "the chat template adds to prompts without a system message: 'You are a helpful AI"
    assert added in capsys.readouterr().err
    assert added in json.dumps(read_metadata(out).made_by)
