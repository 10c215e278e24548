"""Tools of environments, and attempts that `max_turns` ends."""

import asyncio

import polars as pl
import pytest

from examples.tool_call import TOOLS, Calculator
from pipelines.generation.environments import Environment
from pipelines.generation.histories import begin, observation_ids
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import RolloutError
from tests.helpers.generation_helpers import ASK, HERE, tasks_of, trajectories

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 11, "b": 12}}\n</tool_call>'
RESULT = {"role": "tool", "content": "23"}


@pytest.fixture(scope="module")
def with_tools(smollm2_dir):
    return load_tokenizer(smollm2_dir, "chatml_tools_thinking")


def initialised(metadata):
    class Made:
        def init(self, prompt):
            return prompt, metadata

    async def run():
        environment = Environment(Made, "trajectory 'a_0'", 5.0)
        try:
            return await environment.init(ASK)
        finally:
            await environment.close()

    return asyncio.run(run())


@pytest.mark.parametrize("history", ["append", "step_wise"])
def test_the_prompt_of_every_turn_has_the_tools_of_init(with_tools, history):
    talk = begin(history, ASK, with_tools, "test", initialised({"tools": TOOLS}).tools)
    expected = with_tools.render(ASK, TOOLS, generation_prompt=True)
    assert with_tools.backend.decode(talk.prompt_ids()) == expected
    assert '"name": "add"' in expected
    sampled = with_tools.encode([CALL + "<|im_end|>"], ["test"])[0]
    talk.extend(sampled, CALL, None, [RESULT])
    said = [*ASK, {"role": "assistant", "content": CALL}, RESULT]
    whole = with_tools.render(said, TOOLS, generation_prompt=True)
    assert with_tools.backend.decode(talk.prompt_ids()) == whole


def test_observations_are_the_same_tokens_with_and_without_tools(with_tools):
    ids = [observation_ids([36, 2], [RESULT], with_tools, "test", t) for t in (TOOLS, None)]
    assert ids[0] == ids[1] != []


@pytest.mark.parametrize(
    "tools", ["add", {"name": "add"}, [7], [{"function": {}}], [{"type": "function"}], [{1}]]
)
def test_what_is_no_definition_of_a_tool_is_refused(tools):
    with pytest.raises(RolloutError, match="env_output") as info:
        initialised({"tools": tools})
    assert "tools" in info.value.got


@pytest.mark.parametrize("metadata", [{}, None, {"tools": None}, {"tools": []}, "text"])
def test_other_metadata_has_no_tools(metadata):
    assert initialised(metadata) == (ASK, None)


def test_a_bare_function_is_a_definition():
    assert initialised({"tools": [TOOLS[0]["function"]]}).tools == TOOLS


def test_the_calculator_answers_calls_and_scores_the_answer():
    made = Calculator({}, {"a": 11, "b": 12})
    assert made.step(CALL) == {"observations": [RESULT], "reward": 0.0, "done": False}
    (told,) = made.step("<tool_call>{}</tool_call>")["observations"]
    assert told["content"] == "error: KeyError('arguments')"
    assert made.step("It is 23.") == {"observations": [], "reward": 1.0, "done": True}


def test_a_template_without_tools_is_told(engine, tokenizer):
    settings = {"environment": "examples.tool_call:Calculator", "max_turns": 1}
    (finished,), _ = trajectories(engine, tokenizer, tasks_of(1, 1, a=1, b=2), **settings)
    (text,) = finished.warnings
    assert "the chat template ignores tools" in text


def test_an_attempt_that_is_not_done_says_max_turns(engine, tokenizer):
    task = tasks_of(1, 1, num_turns=3)
    for most, reason in ((2, "max_turns"), (3, "stop")):
        settings = {"environment": f"{HERE}:Echo", "max_turns": most, "max_response_tokens": 200}
        _, table = trajectories(engine, tokenizer, task, **settings)
        assert pl.from_arrow(table)["stop_reason"].to_list() == ["stop"] * (most - 1) + [reason]


def test_an_answer_that_was_cut_off_stays_so(engine, tokenizer):
    task = tasks_of(1, 1, num_turns=3)
    settings = {"environment": f"{HERE}:Echo", "max_turns": 1, "max_response_tokens": 1}
    _, table = trajectories(engine, tokenizer, task, **settings)
    assert pl.from_arrow(table)["stop_reason"].to_list() == ["length"]


def test_without_max_turns_the_environment_ends_the_attempt(engine, tokenizer):
    from pipelines.generation.config import GenerateConfig

    most = GenerateConfig(tasks="t", model="m", out="o").max_turns
    task = tasks_of(1, 1, num_turns=5)
    _, table = trajectories(engine, tokenizer, task, max_turns=most, max_response_tokens=4)
    assert table.num_rows == 5
