"""An environment with a tool: the model calls a calculator, and then answers.

python examples/tool_call.py tasks.jsonl
rollouts rl examples/tool_call.toml --out run/
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from examples.addition import is_right

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
"""Definitions of tools, as the chat template expects them."""

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Calculator:
    """A sum of two integers; one point if the last number in the answer is correct.

    A turn with a tool call is answered with its result; any other turn is the answer.
    """

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        del env_config
        self.sum = extras["a"] + extras["b"]

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        """Return the prompt, and the tools for the chat template."""
        return prompt, {"tools": TOOLS}

    def step(self, action: str) -> dict[str, Any]:
        """Run the tool call in the text, or score the answer."""
        call = _CALL.search(action)
        if call is None:
            return {"observations": [], "reward": is_right(action, self.sum), "done": True}
        result = {"role": "tool", "content": _add(call[1])}
        return {"observations": [result], "reward": 0.0, "done": False}


def _add(text: str) -> str:
    """Answer a call such as `{"name": "add", "arguments": {"a": 1, "b": 2}}`."""
    try:
        arguments = json.loads(text)["arguments"]
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        return f"error: {error!r}"


def main(path: Path) -> None:
    """Write tasks."""
    pairs = [(a, b) for a in range(11, 99, 8) for b in range(12, 99, 9)]
    tasks = [
        {"instance_id": f"{a}+{b}", "prompt": f"What is {a}+{b}?", "a": a, "b": b} for a, b in pairs
    ]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
