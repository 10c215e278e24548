"""One-digit addition by a harness that only needs an OpenAI client and a base URL.

python examples/addition.py tasks/          # tasks/train.jsonl and tasks/held_out.jsonl
rollouts rl examples/openai_addition.toml --out run/
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai

from examples.addition import is_right

if TYPE_CHECKING:
    from pipelines.generation.tasks import Task
    from pipelines.harness.launchers import Endpoint


async def solve(endpoint: Endpoint, task: Task) -> float:
    """Ask for the sum twice; each correct answer earns half a point."""
    messages = list(task.prompt)
    reward = 0.0
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as api:
        for _ in range(2):
            answer = await api.chat.completions.create(model=endpoint.model, messages=messages)
            text = answer.choices[0].message.content or ""
            reward += is_right(text, task.extras["sum"]) / 2
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": "Are you sure? Answer with a number."})
    return reward
