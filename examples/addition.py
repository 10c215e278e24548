"""One-digit addition: tasks, and an environment that checks the sum.

python examples/addition.py tasks/          # tasks/train.jsonl and tasks/held_out.jsonl
rollouts rl examples/addition.toml --out run/
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

NUM_HELD_OUT = 20


class Addition:
    """A task with a single turn; the reward is 1 if the last number in the answer is the sum."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        del env_config
        self.sum = extras["sum"]

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        """Return the prompt unchanged."""
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """Score the answer, and end the trajectory."""
        return {"observations": [], "reward": is_right(action, self.sum), "done": True}


def is_right(answer: str, number: int) -> float:
    """Return 1 if the last number in the answer is `number`, else 0."""
    return float(re.findall(r"\d+", answer)[-1:] == [str(number)])


def main(folder: Path) -> None:
    """Write all pairs of digits in random order to two task files."""
    pairs = list(itertools.product(range(10), repeat=2))
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", pairs[:NUM_HELD_OUT]), ("train", pairs[NUM_HELD_OUT:])):
        lines = [
            {
                "instance_id": f"{a}+{b}",
                "prompt": f"What is {a}+{b}? Answer with a number.",
                "sum": a + b,
            }
            for a, b in part
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
