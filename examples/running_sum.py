"""A running sum in two turns: add two digits, then add a third to the result.

python examples/running_sum.py tasks/       # tasks/train.jsonl and tasks/held_out.jsonl
rollouts rl examples/running_sum.toml --out run/
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from examples.addition import is_right

NUM_TRAIN, NUM_HELD_OUT = 200, 20


class RunningSum:
    """A task with two turns; each earns half a point if the last number in the answer is correct.

    After the first turn, the environment states the correct sum.
    """

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        del env_config
        self.digits, self.num_said = extras["digits"], 0

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        """Return the prompt unchanged."""
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """Score the answer, state the sum, and ask for the next one."""
        self.num_said += 1
        total = sum(self.digits[: self.num_said + 1])
        reward = is_right(action, total) / 2
        if self.num_said == 2:
            return {"observations": [], "reward": reward, "done": True}
        said = f"{'Right' if reward else 'Wrong'}, it is {total}. What is {total}+{self.digits[2]}?"
        observation = {"role": "user", "content": said}
        return {"observations": [observation], "reward": reward, "done": False}


def main(folder: Path) -> None:
    """Write triples of digits to two task files."""
    numbers = random.Random(0).sample(range(1000), NUM_TRAIN + NUM_HELD_OUT)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"held_out": numbers[:NUM_HELD_OUT], "train": numbers[NUM_HELD_OUT:]}
    for name, part in parts.items():
        digits = [[number // 100, number // 10 % 10, number % 10] for number in part]
        tasks = [
            {
                "instance_id": f"{a}+{b}+{c}",
                "prompt": f"What is {a}+{b}? Answer with a number.",
                "digits": [a, b, c],
            }
            for a, b, c in digits
        ]
        text = "".join(json.dumps(task) + "\n" for task in tasks)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
