"""The screen that `rollouts stats` prints: groups, lengths, rewards and tokens by layout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipelines.statistics.summary import (
    Distribution,
    Rewards,
    Summary,
    length_distributions,
    reward_distribution,
)
from rollout_io.cli.output import bare_table, drawn, section
from rollout_io.terminal import printable, readable
from schemas.errors import count

LAYOUTS = {"step": "step", "merge_lineage": "merge", "tree_per_group": "tree"}
"""Layouts shown: key in `savings` -> value of `sequence_layout`."""

_BAR = 30
_SHOWN_TOOLS = 12
_LEVELS = "▁▂▃▄▅▆▇█"


def screen(
    path: str,
    summary: Summary,
    savings: Mapping[str, Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """Render the statistics of one dataset, in about 30 lines.

    Args:
        path: Path of the dataset.
        summary: Its summary.
        savings: Cost of each layout.
        tools: Counts of each tool.
    """
    return drawn(
        [
            *section(_shown(path), Group(*_counts(summary.numbers))),
            *section("Lengths", Group(*_lengths(length_distributions(summary)))),
            *section("Rewards", Group(*_rewards(reward_distribution(summary), summary.numbers))),
            *(section("Tools", Group(*_tools(tools))) if tools else ()),
            *section(
                "Tokens that training forwards, by sequence_layout", Group(*_layouts(savings))
            ),
        ]
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _counts(numbers: Mapping[str, Any]) -> Iterable[RenderableType]:
    rows, trajectories = numbers["num_rows"], numbers["num_trajectories"]
    failed, without = numbers["num_failed"], numbers["num_rows_without_logprobs"]
    of_groups = f"{count(trajectories, 'trajectory')} in {count(numbers['num_groups'], 'group')}"
    yield Text(f"{count(rows, 'row')} of {of_groups}, {failed:,} failed")
    if failed:
        groups = count(numbers["num_groups_with_failed"], "group")
        yield Text(
            f"{groups} with failed trajectories, left out of training by default "
            "(--set data.failed=trajectory leaves out only the trajectories)"
        )
    environment = numbers["num_environment_tokens"]
    yield Text(
        f"{count(numbers['num_prompt_tokens'], 'prompt token')}, "
        f"{count(numbers['num_response_tokens'], 'response token')} "
        f"({numbers['num_trained_tokens']:,} trained on)"
        f"{f', {environment:,} of the environment' if environment else ''}"
    )
    if pictures := numbers["num_pictures"]:
        tokens = numbers["num_picture_tokens"]
        size = "an unknown number of tokens" if tokens is None else count(tokens, "token")
        yield Text(f"{count(pictures, 'picture')} of {size}, as often as rows repeat them")
    if without:
        yield Text(f"{count(without, 'row')} without log-probabilities")
    if retokenized := numbers["num_rows_retokenized"]:
        text = "re-tokenized from text: ids are approximate"
        yield Text(f"{count(retokenized, 'row')} {text}")
    if reasons := numbers["stop_reasons"]:
        listed = [f"{_shown(name)} {num:,}" for name, num in list(reasons.items())[:5]]
        yield Text(f"stop reasons: {', '.join(listed)}{', ...' if len(reasons) > 5 else ''}")


def _shown(text: str | None) -> str:
    """Return text from a dataset on one line, without control characters."""
    return "none" if text is None else " ".join(printable(text).split())


def _lengths(lengths: Mapping[str, Distribution]) -> Iterable[RenderableType]:
    table = _table(
        "tokens (last line: rows)", "mean", "median", "p95", "max", left=("from min to max",)
    )
    for label, one in lengths.items():
        mean = "-" if one.mean is None else f"{one.mean:,.1f}"
        ends = [readable(value) for value in (one.median, one.p95, one.max)]
        table.add_row(label, mean, *ends, _sparkline(one.counts))
    yield table


def _rewards(rewards: Rewards, numbers: Mapping[str, Any]) -> Iterable[RenderableType]:
    unknown = numbers["num_unknown_reward"]
    without = f"{count(unknown, 'trajectory')} without a reward" if unknown else ""
    if rewards.mean is None:
        yield Text(without or "no trajectory has a reward")
        return
    solved = "" if rewards.solved is None else f", {rewards.solved:.1%} solved (reward 1)"
    yield Text(f"mean {rewards.mean:.4g}{solved}{f'; {without}' if without else ''}")
    table = _table("reward", "trajectories", left=("",))
    most = max(num for _, num in rewards.bars)
    for label, num in rewards.bars:
        table.add_row(label, f"{num:,}", _bar(num / most))
    yield table
    single = f", {rewards.num_single:,} with fewer than two rewards" if rewards.num_single else ""
    yield Text(
        f"groups: {rewards.num_varied:,} with different rewards, {rewards.num_equal:,} with equal "
        f"rewards (no gradient from group baselines){single}"
    )


def _tools(tools: Sequence[Mapping[str, Any]]) -> Iterable[RenderableType]:
    table = _table("tool", "calls", "failed", "trajectories", left=("",))
    for line in tools[:_SHOWN_TOOLS]:
        numbers = (line[name] for name in ("num_calls", "num_failed", "num_trajectories"))
        bar = _bar(line["num_calls"] / tools[0]["num_calls"])
        table.add_row(_shown(line["name"]), *map(readable, numbers), bar)
    yield table
    if len(tools) > _SHOWN_TOOLS:
        yield Text(f"and {len(tools) - _SHOWN_TOOLS:,} more tools (--json)")


def _layouts(savings: Mapping[str, Mapping[str, Any]]) -> Iterable[RenderableType]:
    has_flops = "training_flops" in savings["step"]
    flops = ("training FLOPs",) if has_flops else ()
    table = _table("layout", "sequences", "tokens", "of step", *flops, left=("",))
    for name, layout in LAYOUTS.items():
        cost = savings[name]
        share = cost["relative_tokens"]
        cells = [readable(cost["num_sequences"]), readable(cost["num_tokens"]), _share(share)]
        cells += [f"{cost['training_flops']:.3g}"] if has_flops else []
        table.add_row(layout, *cells, _bar(share or 0.0))
    yield table


def _table(first: str, *right: str, left: Sequence[str] = ()) -> Table:
    """Return a borderless table: `first` and `left` are left-aligned, `right` right-aligned."""
    return bare_table(first, *right, *left, left={first, *left})


def _bar(share: float) -> str:
    return _drawn("█" * max(round(share * _BAR), int(share > 0)))


def _sparkline(counts: Sequence[int]) -> str:
    """Draw a histogram in one line; empty bins are blank."""
    most = max(counts, default=0)
    levels = [-(-num * len(_LEVELS) // most) for num in counts] if most else []
    return _drawn("".join(" " if not level else _LEVELS[level - 1] for level in levels))


def _drawn(blocks: str) -> str:
    """Replace block characters with ASCII if stdout cannot encode them."""
    try:
        blocks.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return "".join(" " if c == " " else "#" for c in blocks)
    return blocks
