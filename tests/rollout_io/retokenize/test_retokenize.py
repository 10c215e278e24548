import copy
import json
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

from rollout_io.retokenize import (
    ChatTokenizer,
    encode_messages,
    encode_response,
    load_tokenizer,
    retokenize,
)
from rollout_io.retokenize.chat_template import find_template, normalize
from schemas.errors import RolloutError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smol(smollm2_dir):
    return load_tokenizer(smollm2_dir)


@pytest.fixture
def with_template(smol):
    def load(template):
        backend = copy.copy(smol.backend)
        backend.chat_template = template
        return ChatTokenizer(smol.name, backend)

    return load


def broken_rule(call, *arguments, **keywords):
    with pytest.raises(RolloutError) as caught:
        call(*arguments, **keywords)
    return caught.value


def test_the_example_of_encode_response(smol):
    answer = encode_response([{"role": "assistant", "content": "4"}], smol)
    assert answer.response_ids.tolist() == [1, 520, 9531, 198, 36, 2, 198]
    assert answer.loss_mask.tolist() == [False, False, False, False, True, True, False]
    assert answer.spans.tolist() == [[4, 2]]
    assert answer.logprobs is None


def test_the_example_of_retokenize(smol):
    tokens = retokenize(CHAT, smol)
    assert smol.decode(tokens.prompt_token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokens.spans.tolist() == [[0, 2], [16, 2]]
    assert [smol.decode(tokens.response_ids[s : s + n]) for s, n in tokens.spans] == [
        "4<|im_end|>",
        "6<|im_end|>",
    ]


def test_arrays_have_the_types_of_the_table(smol):
    tokens = retokenize(CHAT, smol, logprobs=[[-0.5, -0.1], [-1.0, -0.2]])
    arrays = [field.name for field in fields(tokens) if field.name != "num_literal"]
    kinds = {name: getattr(tokens, name).dtype for name in arrays}
    assert kinds == {
        "prompt_token_ids": np.int32,
        "response_ids": np.int32,
        "loss_mask": np.bool_,
        "logprobs": np.float32,
        "spans": np.int32,
    }


def test_a_newline_fused_with_the_header_trains(smol):
    answer = encode_response([{"role": "assistant", "content": "\n\n4"}], smol)
    assert smol.decode([1116]) == "\n\n"
    assert answer.response_ids.tolist() == [1, 520, 9531, 1116, 198, 36, 2, 198]
    assert answer.spans.tolist() == [[3, 4]]


def test_log_probabilities_stand_at_the_generated_tokens(smol):
    tokens = retokenize(CHAT, smol, logprobs=[[-0.5, -0.25], [-1.0, -2.0]])
    assert tokens.logprobs[tokens.loss_mask].tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert not tokens.logprobs[~tokens.loss_mask].any()


def test_no_lists_of_log_probabilities_fit_a_response_without_an_assistant(smol):
    answer = encode_response([{"role": "user", "content": "hm"}], smol, logprobs=[])
    assert answer.logprobs.tolist() == [0.0] * len(answer.response_ids)
    assert answer.spans.shape == (0, 2)


@pytest.mark.parametrize(
    "logprobs",
    [
        [],
        [[-0.5, -0.1]],
        [[-0.5, -0.1], []],
        [[-0.5, -0.1], None],
        [[-0.5, -0.1], [-1.0]],
        [[-0.5, -0.1], [-1.0, -0.2, -0.3]],
        [[-0.5, -0.1], [-1.0, -0.2], [-0.1]],
        [[-0.5, -0.1], ["x", -0.2]],
        [[[-0.5], [-0.1]], [-1.0, -0.2]],
    ],
)
def test_log_probabilities_of_other_lengths_are_refused(smol, logprobs):
    error = broken_rule(retokenize, CHAT, smol, logprobs=logprobs, where="a.jsonl:3")
    assert (error.rule, error.where) == ("lengths_align", "a.jsonl:3")


def test_nothing_encodes_to_nothing(smol):
    assert encode_messages([], smol).tolist() == []
    assert encode_response([], smol).response_ids.tolist() == []


def test_the_messages_given_stay_as_they_are(smol):
    before = json.dumps(CHAT)
    retokenize(CHAT, smol)
    assert json.dumps(CHAT) == before


def test_without_an_eos_all_after_the_header_trains(with_template):
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    answer = encode_response([{"role": "assistant", "content": "four"}], tokenizer)
    assert tokenizer.decode(answer.response_ids[answer.loss_mask]) == "four"


def test_a_template_that_marks_questions_alone_needs_no_generation_prompt(with_template):
    tokenizer = with_template(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
        "{% else %}<|im_start|>{{ m.content }}<repo_name>{% endif %}{% endfor %}"
    )
    tokens = retokenize(CHAT, tokenizer)
    assert tokenizer.decode(tokens.response_ids[tokens.loss_mask]) == "4<|im_end|>6<|im_end|>"


@pytest.mark.parametrize(
    ("chat", "rule", "where"),
    [
        ([], "retokenize", "m"),
        (CHAT[:2], "retokenize", "m"),
        (CHAT[2:], "retokenize", "m"),
        ([*CHAT, {"role": "system", "content": "x"}], "message_role", "m, message 5"),
        ([*CHAT, {"role": "developer", "content": "x"}], "message_role", "m, message 5"),
        ([*CHAT, {"role": "user", "content": [IMAGE]}], "message", "m, message 5"),
        ([*CHAT, {"role": "user", "content": {"a": 1}}], "message", "m, message 5"),
        ([*CHAT, {"content": "x"}], "message", "m, message 5"),
        ([*CHAT, "x"], "message", "m, message 5"),
        ([*CHAT, {"role": "user", "content": "\ud800"}], "tokenizer", "m, message 5"),
        ([*CHAT[:2], {"role": "assistant", "tool_calls": "f"}], "message", "m, message 2"),
        ([*CHAT[:2], {"role": "assistant", "tool_calls": [{"id": 1}]}], "message", "m, message 2"),
    ],
)
def test_a_conversation_that_cannot_be_encoded_is_refused_by_its_place(smol, chat, rule, where):
    error = broken_rule(retokenize, chat, smol, where="m")
    assert (error.rule, error.where) == (rule, where)


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat_template"),
        ("{% for m in messages %}", "chat_template"),
        ("{{ messages[9].content + 'x' }}", "chat_template"),
        ("{{ messages | length }} messages", "fixed_base"),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}",
            "fixed_base",
        ),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "generation_prompt"),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}",
            "generation_prompt",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt and messages[1].content == 'I am a user.' %}"
            "<|im_start|>assistant\n{% endif %}",
            "generation_prompt",
        ),
    ],
)
def test_a_template_that_cannot_serve_is_refused(with_template, template, rule):
    assert broken_rule(retokenize, CHAT, with_template(template)).rule == rule


def test_tools_that_are_no_json_are_refused(smol):
    assert broken_rule(retokenize, CHAT, smol, tools=[{"name": object()}]).rule == "tools"


def test_each_message_is_rendered_after_the_base_alone(smol):
    class Counting(ChatTokenizer):
        def render(self, messages, *arguments, **keywords):
            sizes.append(len(messages))
            return super().render(messages, *arguments, **keywords)

    sizes = []
    counting = Counting(smol.name, smol.backend)
    retokenize([*CHAT, *CHAT[3:] * 100], counting)
    assert max(sizes) == 3
    # turns with and without their text, prompt, base without and with generation prompt, markers
    assert len(sizes) == 2 * 203 + 1 + 2 + 1


@pytest.mark.slow
def test_fingerprints_follow_the_content_and_not_the_files(smol, smollm2_dir, tmp_path):
    smol.backend.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content), encoding="utf-8")
    copy = load_tokenizer(tmp_path)
    assert copy.fingerprint == smol.fingerprint
    assert copy.template_fingerprint == smol.template_fingerprint
    assert len(smol.fingerprint) == 64

    content["added_tokens"][0]["content"] = "<|another|>"
    file.write_text(json.dumps(content), encoding="utf-8")
    assert load_tokenizer(tmp_path).fingerprint != smol.fingerprint
    named = load_tokenizer(smollm2_dir, "qwen3_acc_thinking")
    assert named.fingerprint == smol.fingerprint
    assert named.template_fingerprint != smol.template_fingerprint


@pytest.mark.slow
def test_encoding_does_not_change_the_fingerprint(smollm2_dir):
    fresh, used = load_tokenizer(smollm2_dir), load_tokenizer(smollm2_dir)
    used.backend(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert used.fingerprint == fresh.fingerprint


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": "{}"},
        {"tokenizer.json": "not json"},
        {"config.json": '{"model_type": "qwen2"}'},
    ],
)
def test_a_directory_without_a_tokenizer_is_refused(tmp_path, files):
    pytest.importorskip("transformers")
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    error = broken_rule(load_tokenizer, tmp_path)
    assert (error.rule, error.where) == ("tokenizer", str(tmp_path))


def test_code_of_a_tokenizer_is_not_run(tmp_path):
    pytest.importorskip("transformers")
    own = json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}})
    (tmp_path / "tokenizer_config.json").write_text(own, encoding="utf-8")
    (tmp_path / "own.py").write_text("raise SystemExit", encoding="utf-8")
    assert broken_rule(load_tokenizer, tmp_path).rule == "tokenizer"


@pytest.mark.parametrize("name", ["nowhere", "org/model"])
def test_only_a_local_directory_is_loaded(name):
    assert broken_rule(load_tokenizer, name).rule == "tokenizer"


def test_a_tokenizer_without_a_chat_template_is_refused(smollm2_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((smollm2_dir / "tokenizer.json").read_bytes())
    assert broken_rule(load_tokenizer, tmp_path).rule == "chat_template"


@pytest.mark.parametrize("path", ["/", "/dev/zero", "no\0name"])
def test_a_template_that_is_no_regular_file_is_refused(path):
    assert broken_rule(find_template, path).rule == "chat_template"


def test_a_template_file_of_a_megabyte_is_taken(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("x" * 1_000_000, encoding="utf-8")
    assert len(find_template(str(file))) == 1_000_000


def test_the_example_of_normalize():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    assert normalize({"role": "assistant", "content": None, "tool_calls": [call]}, "m") == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
    }


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(name):
    message = {"role": "assistant", "content": "4", name: "Easy."}
    expected = {"role": "assistant", "content": "4", "reasoning_content": "Easy."}
    assert normalize(message, "m") == expected


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": "b"}', {"a": "b"}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{}", {})],
)
def test_arguments_become_an_object(arguments, parsed):
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    assert normalize(message, "m")["tool_calls"] == [{"name": "f", "arguments": parsed}]


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", 7, ["a"], "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments):
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    assert broken_rule(normalize, message, "m").rule == "tool_arguments"


def test_text_parts_are_joined_and_an_image_is_refused_by_name():
    parts = [{"type": "text", "text": "a"}, "b"]
    assert normalize({"role": "user", "content": parts}, "m")["content"] == "a\nb"
    error = broken_rule(normalize, {"role": "user", "content": [*parts, IMAGE]}, "m")
    assert "image_url" in error.got


def test_the_package_loads_no_torch_and_no_transformers():
    code = (
        "import sys, rollout_io.retokenize as r; [getattr(r, n) for n in r.__all__]; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_tokenizer_without_a_template_encodes_text_and_renders_no_messages(smol, tmp_path):
    smol.backend.save_pretrained(tmp_path)
    for file in (tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"):
        if file.name.endswith(".jinja"):
            file.unlink(missing_ok=True)
        else:
            config = json.loads(file.read_text(encoding="utf-8"))
            config.pop("chat_template", None)
            file.write_text(json.dumps(config), encoding="utf-8")
    assert broken_rule(load_tokenizer, tmp_path).rule == "chat_template"
    bare = load_tokenizer(tmp_path, needs_template=False)
    assert bare.template_fingerprint is None
    assert bare.encode(["6<|im_end|>"], ["a:1"]) == [[38, 2]]
    assert broken_rule(retokenize, CHAT, bare).rule == "chat_template"
