import copy

import pytest

from pipelines.generation.histories import begin, observation_ids
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from tests.helpers.qwen import chat_template_of, save_qwen3

USER = [{"role": "user", "content": "3+3?"}]
TOOLS = [{"role": "tool", "content": "12 C"}, {"role": "tool", "content": "rain"}]
TWO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return load_tokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = save_qwen3(tmp_path_factory.mktemp("qwen"), chat_template_of("qwen3"), 15_000)
    loaded = load_tokenizer(folder).backend

    def make(name):
        backend = copy.copy(loaded)
        backend.chat_template = chat_template_of(name)
        return ChatTokenizer(name, backend)

    return make


def test_the_worked_example(smollm2):
    expected = [198, 1, 4093, 198, 35, 27, 35, 47, 2, 198, 1, 520, 9531, 198]
    assert observation_ids([36, 2], USER, smollm2) == expected
    assert observation_ids([36], USER, smollm2) == [2, *expected]
    assert observation_ids([36, 2], [], smollm2) == [198, 1, 520, 9531, 198]


def rendered(tokenizer, messages):
    text = tokenizer.render(messages, generation_prompt=True)
    return tokenizer.encode([text], ["test"])[0]


def assert_appending_equals_rendering(tokenizer, talk):
    """`talk`: lists of messages that were given, and texts that were said, by turns."""
    given, answers = talk[::2], talk[1::2]
    history = begin("append", given[0], tokenizer, "test")
    messages = list(given[0])
    assert history.prompt_ids() == rendered(tokenizer, messages)
    for answer, observations in zip(answers, given[1:], strict=True):
        said = tokenizer.encode([answer + tokenizer.eos_token], ["test"])[0]
        history.extend(said, answer, None, observations)
        messages += [{"role": "assistant", "content": answer}, *observations]
        assert history.prompt_ids() == rendered(tokenizer, messages)


LONG = [
    TWO,
    "4",
    USER,
    "6. Is that\n\nall?",
    [{"role": "user", "content": "\n\nYes\n"}],
    "Bye",
    USER,
]


def test_appended_observations_are_smollm2s_own_rendering(smollm2):
    assert_appending_equals_rendering(smollm2, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_appended_observations_are_qwens_own_rendering(qwen, name):
    assert_appending_equals_rendering(qwen(name), LONG)
    assert_appending_equals_rendering(qwen(name), [TWO, "I look.", USER, "Done.", USER])


@pytest.mark.slow
def test_qwen2_5s_tool_messages_are_its_own_rendering(qwen):
    talk = [TWO, "I look it up.", TOOLS, "It rains.", USER]
    assert_appending_equals_rendering(qwen("qwen2_5"), talk)


@pytest.mark.slow
def test_qwen3s_thinking_stays_in_the_tokens_while_tools_answer(qwen):
    talk = [
        TWO,
        "<think>\nhm\n</think>\n\nI look it up.",
        TOOLS,
        "<think>\nso\n</think>\n\nOk",
        TOOLS,
    ]
    assert_appending_equals_rendering(qwen("qwen3"), talk)


def test_appending_keeps_the_thinking_that_qwen3s_template_would_strip(qwen):
    tokenizer = qwen("qwen3")
    history = begin("append", TWO, tokenizer, "test")
    said = tokenizer.encode(["<think>\nhm\n</think>\n\n4<|im_end|>"], ["test"])[0]
    start = history.prompt_ids()
    history.extend(said, "<think>\nhm\n</think>\n\n4", None, USER)
    assert history.prompt_ids()[: len(start + said)] == start + said
    assert "hm" in tokenizer.decode(history.prompt_ids())
    step_wise = begin("step_wise", TWO, tokenizer, "test")
    step_wise.extend(said, "<think>\nhm\n</think>\n\n4", None, USER)
    assert "hm" not in tokenizer.decode(step_wise.prompt_ids())
