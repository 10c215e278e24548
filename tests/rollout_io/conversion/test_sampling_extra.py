"""What else changed the distribution: from a request to the column, through every transform."""

import json
from dataclasses import replace

import polars as pl
import pytest

import pipelines
import rollout_io
from rollout_io.cli.main import run as main
from rollout_io.formats.parsing.bodies import sampling_extra
from tests.helpers import generation_helpers as helpers
from tests.helpers.generation_helpers import trajectories

CHANGES = {
    "min_p": 0.1,
    "min_tokens": 4,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100},
    "allowed_token_ids": [],
    "bad_words": ["no"],
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "function_call": {"name": "search"},
    "thinking_token_budget": 0,
    "vllm_xargs": {"blend": 1},
    "typical_p": 0.9,
    "best_of": 10**30,
}
HARMLESS = {
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "thinking_token_budget": -1,
    "stop": ["x"],
    "ignore_eos": True,
    "seed": 3,
    "n": 2,
    "logprobs": True,
    "max_tokens": 9,
    "extra_body": {"top_k": -1, "return_token_ids": True},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_changes_the_distribution_is_told_whether_it_was_nested_or_not(name):
    said = {name: CHANGES[name]}
    assert json.loads(sampling_extra({**HARMLESS, **said}) or "") == said
    assert json.loads(sampling_extra({"extra_body": said}) or "") == said


def test_fields_that_change_nothing_are_not_told():
    assert sampling_extra(HARMLESS) is None


def line(number, **request):
    call = {
        "session": "a/0",
        "time": number,
        "request": {"messages": [], "temperature": 1.0, **request},
        "response": {
            "prompt_token_ids": [1, 2, 3, 4][: 2 * number],
            "choices": [{"token_ids": [2 * number + 1], "finish_reason": "stop"}],
        },
        "reward": 1.0,
    }
    return json.dumps(call)


@pytest.mark.slow
def test_what_a_logged_call_was_sampled_with_reaches_its_row_and_keeps_it_from_being_merged(
    convert,
):
    table = convert([line(1), line(2, min_p=0.1, bad_words=["no"])])
    said = '{"bad_words":["no"],"min_p":0.1}'
    assert table["sampling_extra"].to_pylist() == [None, said]
    merged = pipelines.merge(pl.LazyFrame(pl.from_arrow(table))).collect()
    assert merged["sampling_extra"].to_list() == [None, said]
    same = convert([line(1, min_p=0.1), line(2, min_p=0.1)], "same")
    merged = pipelines.merge(pl.LazyFrame(pl.from_arrow(same)))
    assert merged.collect()["sampling_extra"].to_list() == ['{"min_p":0.1}']
    apart = pipelines.unmerge(merged).collect()
    assert apart["sampling_extra"].to_list() == ['{"min_p":0.1}'] * 2


@pytest.fixture
def convert(tmp_path):
    def made(lines, name="log"):
        log, out = tmp_path / f"{name}.jsonl", tmp_path / name
        log.write_text("\n".join(lines) + "\n")
        assert main(["convert", str(log), "--format", "calls", "--out", str(out)]) == 0
        return rollout_io.read(out)

    return made


class Taking:
    """An engine that takes any further fields, as vLLM does."""

    def __init__(self, engine):
        self._engine, self.logprobs_mode = engine, engine.logprobs_mode

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def sample(self, ids, sampling, *, session):
        return await self._engine.sample(ids, replace(sampling, extra={}), session=session)


async def biased(client, _):
    await client.sample([1, 2])
    await client.sample([1, 2, 3], min_p=0.25)
    await client.sample([1, 2, 3, 4], extra={"logit_bias": {"7": 5.0}, "ignore_eos": True})
    return 1.0


def test_what_an_agent_or_a_configuration_samples_with_is_in_the_row(engine, tokenizer):
    tasks = helpers.tasks_of(1, 1)
    settings = {"agent": f"{__name__}:biased", "sampling_extra": {"frequency_penalty": 0.5}}
    _, table = trajectories(Taking(engine), tokenizer, tasks, **settings)
    assert table["sampling_extra"].to_pylist() == [
        '{"frequency_penalty":0.5}',
        '{"frequency_penalty":0.5,"min_p":0.25}',
        '{"logit_bias":{"7":5.0}}',
    ]
