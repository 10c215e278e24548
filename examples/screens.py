"""Screens: a grid with one coloured square, whose colour the model reads, three times.

python examples/screens.py tasks.jsonl
rollouts rl examples/screens.toml --out run/
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue")
CELL, CELLS = 16, 4
"""Width of a cell in pixels, and cells in a row."""


class Screens:
    """A task with a screen per turn; each colour that is named earns a third of a point."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        del env_config
        self.screens, self.turn = extras["screens"], 0

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        """Return the prompt, and the first screen."""
        return [*prompt, self.message()], {}

    def step(self, action: str) -> dict[str, Any]:
        """Score the answer, and show the next screen."""
        reward = float(self.screens[self.turn][0] in action) / len(self.screens)
        self.turn += 1
        is_done = self.turn == len(self.screens)
        observations = [] if is_done else [self.message()]
        return {"observations": observations, "reward": reward, "done": is_done}

    def message(self) -> dict[str, Any]:
        """Return the message with the current screen."""
        url = f"data:image/png;base64,{base64.b64encode(drawn(*self.screens[self.turn])).decode()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        return {"role": "user", "content": [picture, {"type": "text", "text": "Which colour?"}]}


def drawn(colour: str, cell: int) -> bytes:
    """Return a PNG file of a grid with one coloured cell."""
    size = CELL * CELLS
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    for at in range(0, size, CELL):
        draw.line((at, 0, at, size), "grey")
        draw.line((0, at, size, at), "grey")
    x, y = cell % CELLS * CELL, cell // CELLS * CELL
    draw.rectangle((x, y, x + CELL, y + CELL), colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def main(path: Path) -> None:
    """Write a task for each order of three colours."""
    tasks = [
        {
            "instance_id": "-".join(colours),
            "prompt": "Name the colour of the square: red, green or blue.",
            "screens": [[c, (5 * i + 3 * n) % CELLS**2] for i, c in enumerate(colours)],
        }
        for n, colours in enumerate(itertools.product(COLOURS, repeat=3))
    ]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
