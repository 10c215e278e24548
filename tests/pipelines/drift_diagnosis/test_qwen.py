"""The ways in which Qwen's prompts are known to break."""

import json

import pytest

from rollout_io.retokenize import load_tokenizer
from tests.helpers.drift_helpers import only_break, steps_of
from tests.helpers.qwen import chat_template_of, save_qwen3

pytestmark = pytest.mark.slow

ASKED = [{"role": "user", "content": "2+2?"}]
AGAIN = {"role": "user", "content": "Sure?"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return load_tokenizer(save_qwen3(tmp_path_factory.mktemp("qwen3"), chat_template_of("qwen3")))


def ids(tokenizer, *texts):
    return [i for text in tokenizer.encode(texts, ["test"] * len(texts)) for i in text]


def two_steps(tokenizer, response, answer):
    """A sampled response, and the prompt the official template makes of what was sent back."""
    sent = [*ASKED, {"role": "assistant", **answer}, AGAIN]
    prompts = [tokenizer.render(chat, generation_prompt=True) for chat in (ASKED, sent)]
    return steps_of([ids(tokenizer, prompt) for prompt in prompts], [response, [7]])


@pytest.mark.parametrize(
    ("sampled", "again"), [(['"', "HAV", "ING", '"'], '"HAVING"'), (["<", "think"], "<think")]
)
def test_text_that_was_cut_otherwise_is_retokenized(qwen, sampled, again):
    response = [*ids(qwen, *sampled), *ids(qwen, "<|im_end|>")]
    found = only_break(two_steps(qwen, response, {"content": again}), qwen)
    assert found["cause"] == "retokenized"
    assert found["lost_text"] == found["now_text"] != ""
    assert found["lost_ids"] != found["now_ids"]


def test_the_newline_after_the_end_of_a_message_is_the_templates(qwen):
    first, answer = "<|im_start|>user\nA<|im_end|>", "<|im_start|>assistant\n"
    glued = ids(qwen, first + answer)
    rendered = ids(qwen, f"{first}\n{answer}B<|im_end|>\n<|im_start|>user\nC<|im_end|>\n{answer}")
    found = only_break(steps_of([glued, rendered], [ids(qwen, "B<|im_end|>"), [7]]), qwen)
    assert (found["cause"], found["now_text"]) == ("template", "\n")
    assert "whitespace" in found["evidence"]
    sampled = ids(qwen, "B<|im_end|>\n\n")
    prompt = ids(qwen, f"{first}\n{answer}")
    assert only_break(steps_of([prompt, rendered], [sampled, [7]]), qwen)["cause"] == "template"


def test_thinking_that_the_template_strips_is_the_templates(qwen):
    answer = "<think>\nEasy.\n</think>\n\n4"
    response = ids(qwen, f"{answer}<|im_end|>")
    found = only_break(two_steps(qwen, response, {"content": answer}), qwen)
    assert (found["cause"], found["evidence"].split(" differ")[0]) == ("template", "think blocks")
    assert found["lost_text"].startswith("<think>")


def test_a_tool_call_that_the_template_spells_anew_is_the_templates(qwen):
    call = {"name": "f", "arguments": {"a": 1}}
    spelled = json.dumps(call, separators=(",", ":"))
    response = ids(qwen, f"<tool_call>\n{spelled}\n</tool_call><|im_end|>")
    answer = {"content": "", "tool_calls": [{"type": "function", "function": call}]}
    found = only_break(two_steps(qwen, response, answer), qwen)
    assert (found["cause"], found["evidence"].split(" differ")[0]) == (
        "template",
        "spellings of tool calls",
    )


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        ("4, I think.<|im_end|>", "4"),
        ("4, I think", "4"),
        ("a .<|im_end|>", "a."),
        ("a .", "a."),
        ("4<|im_end|>", "4."),
    ],
)
def test_an_answer_that_is_sent_back_otherwise_is_edited(qwen, sampled, sent):
    found = only_break(two_steps(qwen, ids(qwen, sampled), {"content": sent}), qwen)
    assert (found["cause"], "assistant message" in found["evidence"]) == ("edited", True)


def test_another_system_message_is_another_agent_and_another_question_a_reset(qwen):
    def prompt(system, question):
        chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return ids(qwen, qwen.render(chat, generation_prompt=True))

    response = ids(qwen, "4<|im_end|>")
    first = prompt("Add.", "2+2?")
    agent = only_break(steps_of([first, prompt("Check.", "4?")], [response, [7]]), qwen)
    reset = only_break(steps_of([first, prompt("Add.", "3+3?")], [response, [7]]), qwen)
    assert (agent["cause"], agent["num_lost_tokens"]) == ("new_agent", 0)
    assert (reset["cause"], reset["num_lost_tokens"] > 0) == ("reset", True)
    told = steps_of([first, prompt("Check.", "4?")], [response, [7]], agent=["main", "main"])
    assert only_break(told, qwen)["cause"] == "reset"


SYSTEM, USER = ("system", "Add."), ("user", "2+2?")


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        ([SYSTEM, USER, ("assistant", "4, ok. "), ("user", "Sure?")], "template"),
        ([SYSTEM, USER, ("assistant", "4"), ("user", "Sure?")], "edited"),
        ([SYSTEM, ("user", "Summary: 4.")], "reset"),
        ([("system", "Check."), ("user", "4?")], "new_agent"),
        ([("system", "Sum."), USER, ("assistant", "4, ok."), ("user", "Sure?")], "edited"),
    ],
)
def test_roles_between_special_tokens_are_roles_too(qwen, now, cause):
    def chat(*messages):
        head = "<|box_start|>{}<|box_end|>\n\n{}"
        told = "".join(head.format(*message) + "<|im_end|>" for message in messages)
        return ids(qwen, "<|vision_start|>" + told + head.format("assistant", ""))

    table = steps_of([chat(SYSTEM, USER), chat(*now)], [ids(qwen, "4, ok.<|im_end|>"), [7]])
    assert only_break(table, qwen)["cause"] == cause


def test_text_without_special_tokens_is_compared_as_a_whole(qwen):
    asked, sampled = ids(qwen, "User: 2+2?\nAssistant:"), ids(qwen, ' "', "HA", "VING")
    same = ids(qwen, 'User: 2+2?\nAssistant: "HAVING\nUser: Sure?\nAssistant:')
    other = ids(qwen, "User: 2+2?\nAssistant: 4\nUser: Sure?\nAssistant:")
    assert only_break(steps_of([asked, same], [sampled, [7]]), qwen)["cause"] == "retokenized"
    assert only_break(steps_of([asked, other], [sampled, [7]]), qwen)["cause"] == "unknown"


def test_ids_that_are_not_the_tokenizers_are_shown_and_nothing_is_told_from_them(qwen):
    found = only_break(steps_of([[1, 2], [1, 2, 2**31 - 1]], [[-3], [7]]), qwen)
    assert (found["cause"], found["lost_text"], found["now_text"]) == (
        "unknown",
        "<-3>",
        "<2147483647>",
    )


def test_half_a_character_at_the_end_of_an_answer_is_text_like_any_other(qwen):
    whole = ids(qwen, "\N{GRINNING FACE}")
    sampled = [*ids(qwen, "4 "), *whole[:1]]
    text = qwen.decode(sampled)
    assert only_break(two_steps(qwen, sampled, {"content": text}), qwen)["cause"] == "retokenized"


def test_the_real_break_of_nemo_rl_is_at_index_4647(qwen, harness_logs):
    path = harness_logs / "nemo_gym" / "nemo_rl.maybe_correct_merged_tokens_test_data.json"
    pair = json.loads(path.read_text())
    seen, prompt = pair["seen_token_ids"], pair["output_prompt_token_ids"]
    header = ids(qwen, "<|im_start|>assistant\n")
    start = max(i for i in range(len(seen)) if seen[i : i + 3] == header) + 3
    found = only_break(steps_of([seen[:start], prompt], [seen[start:], [7]]), qwen)
    assert (found["token_index"], found["cause"]) == (4647, "retokenized")
    assert (found["lost_ids"], found["now_ids"]) == ([26951, 3834], [94224])
    assert found["lost_text"] == found["now_text"] == " Skinny"
