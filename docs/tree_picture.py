"""Draw a forest of real rollouts and its attention mask as an image, for docs/tree.md."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from itertools import groupby
from pathlib import Path

import torch

import pipelines
import rollout_io
from rollout_io.cli.main import run
from trainer.batch import cut_batch, read_rows, to_batch
from trainer.batches.forest import Forest
from trainer.batches.plan import make_plan
from trainer.config.train_config import load_config
from trainer.models.tree_attention import pieces

EXAMPLES = Path(__file__).parents[1] / "examples"
CALLS = (f"{EXAMPLES}/shop.calls.jsonl", "--rewards", f"{EXAMPLES}/shop.rewards.jsonl")
GROUP = "shop-7"
WIDTH, MARGIN, ROW, MASK = 900, 20, 20, 420
AUTHORS = {
    "prompt": "prompt: what the harness sent first",
    "sampled": "sampled by the model, and trained on",
    "observation": "observation: what the harness sent later",
}
STYLE = """
    .card { fill: #fff } text { fill: #37474f; font-size: 13px } .title { font-size: 15px; font-weight: 600 }
    .prompt { fill: #78909c } .sampled { fill: #00897b } .observation { fill: #ffb300 }
    .fork { stroke: #90a4ae; stroke-width: 1.2; fill: none } .own { fill: #00897b } .above { fill: #80cbc4 }
    @media (prefers-color-scheme: dark) {
      .card { fill: #1e2129 } text { fill: #cfd8dc } .own { fill: #4db6ac } .above { fill: #00695c }
      .sampled { fill: #26a69a }
    }
"""


def picture() -> str:
    """Return the Markdown text that describes and embeds the image."""
    forest, num_steps, num_tokens = _forest()
    return (
        f"The picture shows the group {GROUP} of examples/shop.calls.jsonl: 4 attempts with {num_steps} steps and\n"
        f"{num_tokens:,} tokens, of which {forest.num_tokens} are distinct.\n\n"
        f"![Prefix tree of the group {GROUP}, and its attention mask](images/tree.svg)\n\n"
        "Each bar is an unbranched piece of the tree. Steps fork where the harness shortened an earlier answer, or where\n"
        "two attempts sampled different tokens. The mask is all that attention needs to know about the tree: a piece\n"
        "attends to itself, and to the pieces above it on its path.\n"
    )


def svg() -> str:
    """Draw the tree, coloured by who wrote the tokens, and the attention mask."""
    forest, _, _ = _forest()
    tree = _tree_lines(forest)
    top = MARGIN + 56 + ROW * len(pieces(_tree(forest))) + 40
    height = top + MASK + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif">',
        f"  <style>{STYLE}  </style>",
        f'  <rect class="card" width="{WIDTH}" height="{height}" rx="8"/>',
        f'  <text class="title" x="{MARGIN}" y="30">The tree: {forest.num_tokens} distinct tokens, from left to right</text>',
        *_legend(),
        *tree,
        f'  <text class="title" x="{MARGIN}" y="{top - 12}">The attention mask</text>',
        *_mask_lines(forest, top),
    ]
    return "\n".join([*lines, "</svg>", ""])


@functools.cache
def _forest() -> tuple[Forest, int, int]:
    """Return the group's forest, its number of steps, and their number of tokens."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        assert run(["convert", *CALLS, "--format", "calls", "--out", f"{folder}/ds"]) == 0
        rollouts = rollout_io.scan(f"{folder}/ds")
        paths = {"data.dataset": folder, "model.path": "-", "run.out": "-"}
        config = load_config(None, ["batch.sequence_layout=tree"], paths)
        plan = make_plan(pipelines.trajectory_returns(rollouts).collect(), config)
        batch = to_batch(read_rows(rollouts, plan, [GROUP], config.batch))
        rows = rollouts.collect()
    rows = rows.filter(rows["instance_id"] == GROUP)
    num_tokens = sum(int(rows[c].list.len().sum()) for c in ("prompt_token_ids", "response_ids"))
    ((forest,),) = [part.forests for part in cut_batch(batch, config.batch) if part.forests]
    return forest, len(rows), num_tokens


def _tree(forest: Forest) -> torch.Tensor:
    return torch.stack([forest.position_ids, forest.subtree_end])[None, None]


def _authors(forest: Forest) -> list[str]:
    """Return the author of each token: a key of `AUTHORS`."""
    depths, ids = forest.position_ids.tolist(), forest.token_ids.tolist()
    targets = set(zip(forest.target_parent.tolist(), forest.target_token.tolist(), strict=True))
    path, authors = [0] * (max(depths) + 1), list[str]()
    for position, depth in enumerate(depths):
        above = path[depth - 1] if depth else None
        if above is not None and (above, ids[position]) in targets:
            authors.append("sampled")
        else:
            is_first = above is None or authors[above] == "prompt"
            authors.append("prompt" if is_first else "observation")
        path[depth] = position
    return authors


def _legend() -> list[str]:
    lines, x = list[str](), MARGIN
    for author, text in AUTHORS.items():
        lines.append(f'  <rect class="{author}" x="{x}" y="42" width="14" height="12" rx="2"/>')
        lines.append(f'  <text x="{x + 20}" y="53">{text}</text>')
        x += 40 + 7 * len(text)
    return lines


def _tree_lines(forest: Forest) -> list[str]:
    authors = _authors(forest)
    scale = (WIDTH - 2 * MARGIN) / (int(forest.position_ids.max()) + 1)
    lines, begin = list[str](), 0
    ends = list[tuple[float, float]]()
    for number, piece in enumerate(pieces(_tree(forest))):
        x, y = MARGIN + piece.depth * scale, MARGIN + 52 + number * ROW
        if piece.above is not None:
            end_x, end_y = ends[piece.above]
            lines.append(
                f'  <path class="fork" d="M{end_x:.1f} {end_y:.1f}V{y + 6:.1f}H{x + 1:.1f}"/>'
            )
        at = x
        for author, tokens in groupby(authors[begin : begin + piece.size]):
            width = len(list(tokens)) * scale
            lines.append(
                f'  <rect class="{author}" x="{at:.1f}" y="{y}" width="{width:.1f}" height="12"/>'
            )
            at += width
        ends.append((at, y + 12))
        begin += piece.size
    return lines


def _mask_lines(forest: Forest, top: float) -> list[str]:
    """Draw a triangle per piece, and a rectangle for the later tokens that attend to it."""
    scale = MASK / forest.num_tokens
    lines, begin = list[str](), 0
    for piece in pieces(_tree(forest)):
        end, below = begin + piece.size, int(forest.subtree_end[begin])
        x, y, right, middle, bottom = (
            round(offset + scale * token, 1)
            for offset, token in (
                (MARGIN, begin),
                (top, begin),
                (MARGIN, end),
                (top, end),
                (top, below),
            )
        )
        lines.append(f'  <path class="own" d="M{x} {y}L{right} {middle}H{x}Z"/>')
        if below > end:
            lines.append(f'  <path class="above" d="M{x} {middle}H{right}V{bottom}H{x}Z"/>')
        begin = end
    text = (
        "Rows are queries and columns are keys,",
        "both in the order of the bars above.",
        "",
        "Triangles: a token attends to those before it in its bar.",
        "Rectangles: tokens further down attend to the entire bar.",
        "Elsewhere: branches do not see each other.",
    )
    at = MARGIN + MASK + 30
    return lines + [
        f'  <text x="{at}" y="{top + 20 + 20 * number}">{line}</text>'
        for number, line in enumerate(text)
        if line
    ]


if __name__ == "__main__":
    print(svg())  # noqa: T201
