"""Plot one or more datasets as an image (`rollouts plot DS`). Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.drift_diagnosis.diagnosis import Report, diagnose_dataset
from pipelines.rewards import are_equal
from pipelines.statistics.savings import Cost, dataset_savings
from pipelines.statistics.summary import Summary, dataset_summary
from rollout_io.dataset.parallel import Workers
from schemas.errors import count
from trainer.reports import run_plot

LAYOUTS = {
    "step": "steps",
    "merge_lineage": "merged",
    "tree_per_trajectory": "tree per\ntrajectory",
    "tree_per_group": "tree per\ngroup",
}
"""Labels of the layouts, by their names in `dataset_savings`."""

_CAUSES = {
    "edited": "#d62728",
    "reset": "#ff7f0e",
    "retokenized": "#9467bd",
    "template": "#e377c2",
    "dataset": "#bcbd22",
    "unknown": "#8c564b",
    "overlap": "#17becf",
    "new_agent": "#2ca02c",
}
"""Colors of the causes of drift, in the order in which they are drawn."""
_MAX_BINS, _MAX_TURNS, _MAX_NAMED = 30, 60, 16
_BREAKS = "Steps that do not continue the previous step"


@dataclass(frozen=True, slots=True)
class DatasetStatistics:
    """Statistics of a dataset to plot.

    Attributes:
        name: Name of the dataset.
        summary: Statistics of the dataset.
        num_following: Number of steps that follow another step, by step_index.
        breaks: Number of steps that do not continue the previous step, by step_index and cause.
        costs: Cost of each layout.
    """

    name: str
    summary: Summary
    num_following: Mapping[int, int]
    breaks: Mapping[tuple[int, str], int]
    costs: Mapping[str, Cost]

    @classmethod
    def of(cls, path: str, name: str, workers: Workers) -> DatasetStatistics:
        """Compute the statistics of a valid dataset; drift is diagnosed without a tokenizer."""
        summary = dataset_summary(path, workers=workers)
        report = Report.of(diagnose_dataset(path, workers=workers), limit=0)
        breaks = {
            (line["step_index"], line["cause"]): line["num_breaks"]
            for line in report.by("step_index", "cause")
        }
        costs = dataset_savings(path, workers=workers)
        return cls(name, summary, dict(sorted(report.following.items())), breaks, costs)


def plot_datasets(
    datasets: Mapping[str, Workers], out: Path, max_row_tokens: int | None = None
) -> None:
    """Plot lengths, rewards, drift and the tokens of each layout.

    Args:
        datasets: Paths of valid datasets, and the workers that read each.
        out: Image file that `run_plot.check_image` accepts; the format follows from the extension.
        max_row_tokens: Length to mark, beyond which training truncates rows.
    """
    names = run_plot.names_of(list(datasets))
    statistics = [
        DatasetStatistics.of(path, name, workers)
        for name, (path, workers) in zip(names, datasets.items(), strict=True)
    ]
    run_plot.save(dataset_figure(statistics, max_row_tokens), out)


def dataset_figure(datasets: Sequence[DatasetStatistics], max_row_tokens: int | None = None) -> Any:
    """Draw one dataset in full, or overlay several."""
    figure, axes = run_plot.panels(6, 2, (4.3, 3.0))
    prompts, responses, rows, rewards, drift, layouts = axes
    lengths = [dataset.summary.lengths for dataset in datasets]
    _draw_lengths(prompts, "Prompts", [table["prompt"] for table in lengths])
    _draw_lengths(responses, "Responses", [table["response"] for table in lengths])
    both = [table["prompt"] + table["response"] for table in lengths]
    _draw_lengths(rows, "Rows (prompt + response)", both, max_row_tokens)
    if len(datasets) == 1:
        _draw_groups(rewards, datasets[0].summary.returns)
        _draw_causes(drift, datasets[0])
        numbers = datasets[0].summary.numbers
        place = {"x": 0.01, "ha": "left", "fontsize": 11}
        counts = (
            f"{count(numbers['num_rows'], 'row')} of "
            f"{count(numbers['num_trajectories'], 'trajectory')} in "
            f"{count(numbers['num_groups'], 'group')}"
        )
        figure.suptitle(f"{run_plot.shortened(datasets[0].name)}: {counts}", **place)
    else:
        _draw_profiles(rewards, [dataset.summary.returns for dataset in datasets])
        _draw_drift(drift, datasets)
        run_plot.legend(figure, [dataset.name for dataset in datasets], 2)
    _draw_layouts(layouts, [dataset.costs for dataset in datasets])
    return figure


def _draw_lengths(
    axis: Any, name: str, lengths: Sequence[pl.Series], cut_off: int | None = None
) -> None:
    all_lengths = pl.concat(lengths)
    if all_lengths.is_empty():
        _draw_nothing(axis, name, "no rows")
        return
    ordered = all_lengths.sort().to_list()
    low, high = ordered[0], ordered[-1]
    # Whole numbers of tokens, so that all bins cover the same number of lengths.
    width = -(-(high - low + 1) // _MAX_BINS)
    edges = np.arange(low, high + 1 + width, width)
    if len(lengths) == 1:
        values = lengths[0]
        detail = f"median {ordered[(len(ordered) - 1) // 2]:,}, longest {high:,}"
        axis.hist(values.to_numpy(), bins=edges, color=run_plot.color(0), alpha=0.85)
        axis.yaxis.set_major_locator(_whole_numbers())
        axis.set_ylabel("rows", fontsize=9.5)
    else:
        detail = "share of each dataset's rows"
        for number, values in enumerate(lengths):
            counts, _ = np.histogram(values.to_numpy(), bins=edges)
            shares, color = counts / max(len(values), 1), run_plot.color(number)
            axis.stairs(shares, edges, color=color, linewidth=1.7)
            axis.stairs(shares, edges, color=color, alpha=0.15, fill=True)
        axis.yaxis.set_major_formatter(_percent())
        axis.set_ylabel("share of rows", fontsize=9.5)
    if cut_off is not None:
        beyond = sum(int((values > cut_off).sum()) for values in lengths)
        rows = count(len(all_lengths), "row")
        detail = f"{beyond:,} of {rows} beyond max_row_tokens = {cut_off:,}"
        axis.axvline(cut_off, color="#d62728", linewidth=1.4, linestyle="--")
    _count_tokens(axis.xaxis)
    axis.set_xlabel("tokens", fontsize=9.5)
    run_plot.title(axis, name, detail)


def group_rewards(returns: pl.DataFrame) -> pl.DataFrame:
    """Return the mean, minimum and maximum return of each group, the best group first.

    Returns:
        instance_id, mean, low, high; is_equal: true if a group has two or more known returns that
        are all equal, so that group baselines give no gradient; is_single: true if only one return
        is known. Groups without a known return are left out.
    """
    value = pl.col("return").fill_nan(None)
    groups = returns.group_by("instance_id", maintain_order=True).agg(
        mean=value.mean(),
        low=value.min(),
        high=value.max(),
        is_equal=are_equal(pl.col("return")),
        is_single=value.count() < 2,
    )
    return groups.drop_nulls("mean").sort("mean", descending=True, maintain_order=True)


def _draw_groups(axis: Any, returns: pl.DataFrame) -> None:
    groups = group_rewards(returns)
    if groups.is_empty():
        _draw_nothing(axis, "Reward by group", "no trajectory has a reward")
        return
    places = np.arange(len(groups))
    num_equal, num_single = int(groups["is_equal"].sum()), int(groups["is_single"].sum())
    varied = ~(groups["is_equal"] | groups["is_single"]).to_numpy()
    small = {"markersize": 6 if len(groups) <= 60 else 3, "linestyle": "none", "marker": "o"}
    low, high, mean = (groups[name].to_numpy() for name in ("low", "high", "mean"))
    axis.vlines(places[varied], low[varied], high[varied], color="C0", alpha=0.35, linewidth=2)
    axis.plot(places[varied], mean[varied], color="C0", **small)
    axis.plot(places[~varied], mean[~varied], color=run_plot.GREY, **small)
    if len(groups) <= _MAX_NAMED:
        names = [run_plot.shortened(name, 16) for name in groups["instance_id"]]
        axis.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    else:
        axis.set_xlabel("groups, best first", fontsize=9.5)
        axis.xaxis.set_major_locator(_whole_numbers())
    axis.set_ylabel("return: mean, min to max", fontsize=9.5)
    detail = f"{int(varied.sum()):,} with different rewards, {num_equal:,} equal (grey)"
    if num_single:
        detail += f", {num_single:,} with one known reward"
    run_plot.title(axis, "Reward by group", detail)


def _draw_profiles(axis: Any, returns: Sequence[pl.DataFrame]) -> None:
    name, detail = "Reward by group", "mean return of each group, best first"
    profiles = [group_rewards(one)["mean"].to_numpy() for one in returns]
    if not any(map(len, profiles)):
        _draw_nothing(axis, name, "no trajectory has a reward")
        return
    for number, means in enumerate(profiles):
        if len(means):
            share = np.linspace(0, 1, len(means) + 1)
            axis.stairs(means, share, baseline=None, color=run_plot.color(number), linewidth=1.7)
    axis.xaxis.set_major_formatter(_percent())
    axis.set_xlabel("groups", fontsize=9.5)
    axis.set_ylabel("mean return", fontsize=9.5)
    run_plot.title(axis, name, detail)


def _draw_causes(axis: Any, dataset: DatasetStatistics) -> None:
    if not dataset.num_following:
        _draw_nothing(axis, _BREAKS, "no step follows another")
        return
    last = max(dataset.num_following)
    width = -(-last // _MAX_TURNS)
    places = np.arange(1, last + 1, width) + (width - 1) / 2
    following = _binned(dataset.num_following, last, width)
    bottom = np.zeros(len(places))
    breaks = {
        cause: _binned({t: n for (t, c), n in dataset.breaks.items() if c == cause}, last, width)
        for cause in _CAUSES
    }
    breaks = {cause: counts for cause, counts in breaks.items() if counts.any()}
    for cause, counts in breaks.items():
        bar = {"bottom": bottom, "label": cause.replace("_", " ")}
        axis.bar(places, counts, 0.85 * width, color=_CAUSES[cause], **bar)
        bottom = bottom + counts
    rest = {"bottom": bottom, "color": run_plot.FAINT, "label": "continues"}
    axis.bar(places, following - bottom, 0.85 * width, **rest)
    axis.xaxis.set_major_locator(_whole_numbers())
    axis.yaxis.set_major_locator(_whole_numbers())
    axis.set_xlabel("step_index", fontsize=9.5)
    axis.set_ylabel("steps", fontsize=9.5)
    axis.set_ylim(0, float(following.max()) * (1.35 if breaks else 1.1))
    axis.legend(loc="upper right", fontsize=8, ncols=3, frameon=False, handlelength=1)
    num = int(bottom.sum())
    detail = f"{num:,} of {count(int(following.sum()), 'step')} following another, by cause"
    run_plot.title(axis, _BREAKS, detail)


def _draw_drift(axis: Any, datasets: Sequence[DatasetStatistics]) -> None:
    if not any(dataset.num_following for dataset in datasets):
        _draw_nothing(axis, _BREAKS, "no step follows another")
        return
    for number, dataset in enumerate(datasets):
        shares = {
            turn: sum(n for (t, _), n in dataset.breaks.items() if t == turn) / num
            for turn, num in dataset.num_following.items()
        }
        marker = "o" if len(shares) <= _MAX_TURNS else None
        style = {"marker": marker, "markersize": 4, "linewidth": 1.4}
        axis.plot(list(shares), list(shares.values()), color=run_plot.color(number), **style)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(_whole_numbers())
    axis.yaxis.set_major_formatter(_percent())
    axis.set_xlabel("step_index", fontsize=9.5)
    axis.set_ylabel("share of steps", fontsize=9.5)
    run_plot.title(axis, _BREAKS, "share of the steps following another")


def _binned(counts: Mapping[int, int], last: int, width: int) -> npt.NDArray[np.float64]:
    """Sum the counts of turns 1 to `last` in bins of `width` turns."""
    every = np.zeros(-(-last // width) * width)
    for turn, num in counts.items():
        every[turn - 1] += num
    summed: npt.NDArray[np.float64] = every.reshape(-1, width).sum(axis=1)
    return summed


def _draw_layouts(axis: Any, costs: Sequence[Mapping[str, Cost]]) -> None:
    places, height = np.arange(len(LAYOUTS)), 0.8 / len(costs)
    most = max(cost[name].num_tokens for cost in costs for name in LAYOUTS)
    for number, cost in enumerate(costs):
        tokens = [cost[name].num_tokens for name in LAYOUTS]
        at = places + (number - (len(costs) - 1) / 2) * height
        bars = axis.barh(at, tokens, 0.9 * height, color=run_plot.color(number), alpha=0.85)
        labels = [f"{num / tokens[0]:.0%}" if tokens[0] else "" for num in tokens]
        axis.bar_label(bars, labels, padding=3, fontsize=9 if len(costs) <= 2 else 7)
    axis.set_yticks(places, list(LAYOUTS.values()))
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlim(0, 1.15 * max(most, 1))
    _count_tokens(axis.xaxis)
    axis.set_xlabel("tokens", fontsize=9.5)
    run_plot.title(axis, "Tokens that training forwards", "by layout; % of separate steps")


def _draw_nothing(axis: Any, name: str, why: str) -> None:
    run_plot.title(axis, name)
    axis.grid(visible=False)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.text(0.5, 0.5, why, ha="center", transform=axis.transAxes, color=run_plot.GREY)


def _count_tokens(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axis.set_major_formatter(EngFormatter(sep=""))


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(xmax=1, decimals=0)


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=8, integer=True, min_n_ticks=1)
