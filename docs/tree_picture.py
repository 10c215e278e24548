"""Draw a forest of real rollouts and its attention mask as text, for docs/tree.md."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import torch

import pipelines
import rollout_io
from rollout_io.cli.main import run
from trainer.batches.data import load_batch
from trainer.batches.forest import Forest, attention_mask
from trainer.batches.packing import cut_batch
from trainer.batches.plan import make_plan
from trainer.config.train_config import TrainConfig
from trainer.models.tree_attention import pieces
from trainer.run.settings import packing_of, plan_settings

EXAMPLES = Path(__file__).parents[1] / "examples"
CALLS = (f"{EXAMPLES}/shop.calls.jsonl", "--rewards", f"{EXAMPLES}/shop.rewards.jsonl")
GROUP, TOKENS_PER_CHARACTER, PIECES = "shop-7", 10, 14


def picture() -> str:
    """Draw the pieces of a group's forest, indented by depth, and the attention mask."""
    forest, num_steps = _forest()
    found = pieces(_tree(forest))
    lines, depth = [], list[int]()
    begin = 0
    for number, piece in enumerate(found):
        depth.append(0 if piece.above is None else depth[piece.above] + 1)
        targets = forest.target_parent
        inside = int(((targets >= begin) & (targets < begin + piece.size)).sum())
        bar = f"{'  ' * depth[-1]}{begin}-{begin + piece.size - 1}"
        if number < PIECES:
            lines.append(f"{bar:32}depth {piece.depth:3}  predicts {inside:3}")
        begin += piece.size
    lines.append(f"... and {len(found) - PIECES} more")
    return (
        f"The group {GROUP} of examples/shop.calls.jsonl: {num_steps} steps, {forest.num_tokens} tokens"
        f" to forward.\nEach line is an unbranched piece, with the positions of its tokens:\n\n```\n"
        + "\n".join(lines)
        + f"\n```\n\nThe attention mask, with one row per block of {TOKENS_PER_CHARACTER} queries and one"
        f" character per {TOKENS_PER_CHARACTER} x {TOKENS_PER_CHARACTER} tokens\n(`#` all attend, `+` some,"
        " `.` none):\n\n```\n" + "\n".join(_mask(forest)) + "\n```\n"
    )


def _forest() -> tuple[Forest, int]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        assert run(["convert", *CALLS, "--format", "calls", "--out", f"{folder}/ds"]) == 0
        rollouts = rollout_io.scan(f"{folder}/ds")
        config = TrainConfig(dataset=folder, model="-", out="-", sequence_layout="tree")
        plan = make_plan(pipelines.trajectory_returns(rollouts).collect(), plan_settings(config))
        batch = load_batch(rollouts, plan, [GROUP], "tree")
    ((forest,),) = [part.forests for part in cut_batch(batch, packing_of(config)) if part.forests]
    return forest, len(batch.names)


def _tree(forest: Forest) -> torch.Tensor:
    return torch.stack([forest.position_ids, forest.subtree_end])[None, None]


def _mask(forest: Forest) -> list[str]:
    mask = attention_mask(forest.subtree_end)[0, 0].numpy()
    size = TOKENS_PER_CHARACTER
    rows = [mask[start : start + size] for start in range(0, len(mask), size)]
    lines = []
    for number, row in enumerate(rows):
        shares = [row[:, start : start + size].mean() for start in range(0, len(mask), size)]
        lines.append("".join("#" if s == 1 else "+" if s else "." for s in shares[: number + 1]))
    return lines


if __name__ == "__main__":
    print(picture())  # noqa: T201
