"""A real vLLM that was given a template of ours renders what we render, to the token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipelines.generation import Sampling
from pipelines.generation.engines.vllm import VllmEngine
from pipelines.generation.processes import VllmServer
from rollout_io.retokenize.chat_template import KEEPS_ALL, find_template
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from tests.helpers.chat_helpers import ANSWERED, CONVERSATIONS, prompt_ids

pytestmark = pytest.mark.vllm

ACCUMULATES = "qwen3_acc_thinking"


def served(server: VllmServer, messages: Any, tools: Any, arguments: Any, **extra: Any) -> Any:
    """The ids that the server made of messages."""

    async def run() -> list[int]:
        async with VllmEngine(server.url, logprobs_mode="processed") as engine:
            sampling = Sampling(max_tokens=1, extra=extra)
            sampled = await engine.chat(
                messages, sampling, tools=tools, chat_template_kwargs=arguments
            )
            return sampled.prompt_token_ids

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("messages", "tools"), CONVERSATIONS.values(), ids=[*map(str, CONVERSATIONS)]
)
def test_a_server_with_our_template_makes_our_prompt_of_messages(
    template_server: VllmServer, smollm2_dir: Path, messages: Any, tools: Any
) -> None:
    tokenizer = load_tokenizer(smollm2_dir, KEEPS_ALL)
    got = served(template_server, messages, tools, None)
    assert tokenizer.decode(got) == tokenizer.decode(prompt_ids(tokenizer, messages, tools))
    assert got == prompt_ids(tokenizer, messages, tools)


@pytest.mark.parametrize("enable_thinking", [False, True])
def test_arguments_of_the_template_reach_the_server_as_they_reach_ours(
    template_server: VllmServer, smollm2_dir: Path, *, enable_thinking: bool
) -> None:
    arguments = {"enable_thinking": enable_thinking}
    plain = load_tokenizer(smollm2_dir, ACCUMULATES)
    tokenizer = ChatTokenizer(plain.name, plain.backend, arguments)
    asked = find_template(ACCUMULATES)
    got = served(template_server, ANSWERED, None, arguments, chat_template=asked)
    assert got == prompt_ids(tokenizer, ANSWERED, None)
    assert tokenizer.decode(got).endswith("</think>\n\n") != enable_thinking
