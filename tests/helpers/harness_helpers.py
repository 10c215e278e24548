"""Harnesses for the tests: they know an OpenAI client, a base URL and nothing else."""

import contextlib

import openai

from pipelines.generation.engines.base import Sampled
from trainer.engine.embedded import TransformersEngine

HERE = "tests.helpers.harness_helpers"


def reward_of(text):
    return len(text) % 97 / 96


class Scripted:
    """An engine that samples the same tokens whatever it is asked."""

    logprobs_mode = "processed"

    def __init__(self, tokenizer, text):
        self.tokenizer, self.text, self.asked = tokenizer, text, []
        self.policy_version = 1

    async def sample(self, prompt_token_ids, sampling, **_):
        (ids,) = self.tokenizer.encode([self.text], ["text"])
        self.asked.append((list(prompt_token_ids), sampling))
        return Sampled(
            prompt_token_ids=list(prompt_token_ids),
            response_ids=ids,
            rollout_logprobs=[-0.5] * len(ids),
            stop_reason="stop",
            text=self.text,
            policy_version=self.policy_version,
        )

    chat = TransformersEngine.chat


async def two_turns(endpoint, task):
    """A chat of two turns, as any harness makes it: with the content of the answers."""
    messages = list(task.prompt)
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as api:
        for turn in range(2):
            answer = await api.chat.completions.create(model=endpoint.model, messages=messages)
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}]
            messages += [{"role": "user", "content": f"More {turn}."}]
    return {"reward": reward_of(text), "metrics": {"turns": 2}}


async def out_of_context(endpoint, task):
    """Two turns, of which the harness says that they filled the context."""
    found = await two_turns(endpoint, task)
    return found | {"reward": 0.0, "stop_reason": "context_length"}


def blocking(endpoint, task):
    """Not async; a stream."""
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as api:
        parts = api.chat.completions.create(model="any", messages=list(task.prompt), stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    return reward_of(text)


async def silent(endpoint, task):
    del endpoint, task
    return 1.0


async def raising(endpoint, task):
    await two_turns(endpoint, task)
    raise OSError("no sandbox")


async def rejected(endpoint, task):  # noqa: ARG001
    """A call that no engine can answer."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as api:
        with contextlib.suppress(openai.BadRequestError):
            await api.responses.create(model=endpoint.model, input="x", truncation="auto")
    return 1.0
