"""Attribute an update of a run to its rows, trajectories and groups, and describe the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollout_io.cli.output import bare_table, drawn, section
from rollout_io.terminal import printable
from schemas.errors import count
from schemas.numpy_arrays import to_arrow
from schemas.ragged import FloatArray, offsets_of
from schemas.records import UPDATE_SHARE_COLUMNS
from trainer.batches.chains import Origins
from trainer.forensics.reconstruct import Reconstruction, forwarding, reconstruct
from trainer.forensics.row_gradients import Linearized, linearize, norm

OF_SEQUENCE = ("gradient_norm", "advantage", "mismatch", "surprise", "score")
QUANTILE = 0.9
SHARE_SCALE = 10.0
FLOOR = 1e-12
SHARES = pl.Schema({c.name: pl.Series(pa.array([], c.type)).dtype for c in UPDATE_SHARE_COLUMNS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """Attribution of a run's update to the rows of its batch.

    G is the gradient of the update before clipping, and G_i is the gradient of row i: see
    `trainer.forensics.row_gradients`. `rows` has these columns:

    - `row` (the row's name), `trajectory_id` and `instance_id`;
    - `steps`: list of the `step_index` of the dataset rows whose targets the row contains;
    - `selectors`: list of values of `rollouts replay --without` that select the row;
    - `num_targets`, and `advantage`, which is the mean over the row's targets;
    - `share`: <G_i, G> / |G|^2; `gradient_norm`: |G_i|;
    - `mismatch` and `surprise`: see `traits`; `score` and `trait`: see `outlier_scores`.
    """

    run: str  # its directory, as specified
    update: int  # its `global_step`
    dataset: str
    gradient_norm: float  # |G|, before clipping
    max_grad_norm: float  # norm above which the update clips the gradient
    num_targets: int  # trained tokens of the update
    rows: pl.DataFrame  # sorted by how far they stand out
    trajectories: pl.DataFrame  # by decreasing |share|, with `num_rows` and `share`
    groups: pl.DataFrame  # like `trajectories`
    shares: pl.DataFrame  # one row for each row of the dataset: see `_shares`


def blame(run: str | Path, update: int, *, places: Mapping[str, str] | None = None) -> Blame:
    """Attribute an update of a run to its rows.

    Args:
        run: Directory of a run of `rollouts train` or `rollouts rl`; it is only read.
        update: Number of the update: its `global_step`, counted from 1.
        places: New paths of the dataset and models that have been moved; see `reconstruct`.

    Raises:
        RolloutError: See `reconstruct`; or `blame_rows`: a user's loss compares rows.
    """
    with forwarding("blame", "reconstructing", update) as passes:
        reconstruction = reconstruct(run, update, places=places, passes=passes)
    return attribute(reconstruction, run=run)


def attribute(reconstruction: Reconstruction, *, run: str | Path | None = None) -> Blame:
    """Attribute a reconstructed update to its rows; see `blame`, also for the errors."""
    pending, training = reconstruction.pending, reconstruction.run
    origins = pending.batch.origins
    assert origins is not None  # `reconstruct` records all tokens
    update = linearize(training, pending.batch, pending.forests)
    update.check_separate()
    norms, total = update.gradients()
    square = norm(total) ** 2
    token_shares = update.products(total) / max(square, 1e-300)
    rows = _rows(update, origins, norms, token_shares)
    named, dataset = str(run or reconstruction.recorded.path), training.config.data.dataset
    keys = {"run": named, "global_step": reconstruction.update, "dataset": dataset}
    return Blame(
        run=named,
        update=reconstruction.update,
        dataset=dataset,
        gradient_norm=square**0.5,
        max_grad_norm=training.config.optimizer.max_grad_norm,
        num_targets=int(update.targets.sum()),
        rows=rows.drop("batch_row"),
        trajectories=_units(rows, "trajectory_id"),
        groups=_units(rows, "instance_id"),
        shares=_shares(update, origins, token_shares, rows, keys),
    )


def _units(rows: pl.DataFrame, key: str) -> pl.DataFrame:
    """Return the shares of trajectories or groups, the largest first."""
    units = rows.group_by(key, maintain_order=True).agg(num_rows=pl.len(), share=pl.sum("share"))
    return units.sort(pl.col("share").abs(), descending=True, maintain_order=True)


def _rows(
    update: Linearized, origins: Origins, norms: FloatArray, token_shares: FloatArray
) -> pl.DataFrame:
    """Build the table `Blame.rows`, with each row's index in the batch as `batch_row`."""
    batch, rows, share = update.batch, update.rows, update.sums(token_shares)
    of_rows, num_targets = traits(update, norms, share), update.sums(update.targets)
    scores = pl.DataFrame(outlier_scores(of_rows))
    best = scores.to_numpy().argmax(1)
    table = pl.DataFrame([_label(update, origins, row) for row in rows.tolist()]).with_columns(
        batch_row=rows,
        instance_id=pl.Series([batch.group_names[number] for number in batch.group[rows]]),
        num_targets=num_targets.astype(np.int64),
        **(of_rows | {"advantage": update.sums(batch.advantages.numpy()) / num_targets}),
        score=scores.max_horizontal(),
        trait=pl.Series([scores.columns[number] for number in best]),
    )
    return table.sort("score", descending=True, maintain_order=True)


def _label(update: Linearized, origins: Origins, row: int) -> dict[str, Any]:
    """Name a row of the batch after the stored rows that contain its targets."""
    begin, end = update.batch.responses.offsets[row : row + 2]
    slots = begin + np.flatnonzero(update.targets[begin:end])
    stored = origins.rows[np.unique(origins.of(slots)[0])]
    steps = stored["step_index"].sort().to_list()
    trajectory, of_batch = str(stored["trajectory_id"][0]), update.batch.trajectory
    named = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
    is_alone = np.count_nonzero(of_batch == of_batch[row]) == 1
    return {
        "row": f"{trajectory}, {named}",
        "trajectory_id": trajectory,
        "steps": steps,
        "selectors": [trajectory] if is_alone else [f"{trajectory}:{step}" for step in steps],
    }


def _shares(
    update: Linearized,
    origins: Origins,
    token_shares: FloatArray,
    rows: pl.DataFrame,
    keys: Mapping[str, Any],
) -> pl.DataFrame:
    """Build the table of shares, with one row for each stored row that the update trained on.

    The columns `share` and `token_shares` describe the stored row. All later columns describe the
    sequence that the update forwarded, which consists of several stored rows if these were merged:
    `sequence` is the rank of the sequence, `num_sequence_rows` is its number of stored rows, and
    the remaining columns are defined in `Blame.rows`. `token_shares` is [T]; `rows` are in order of
    rank.
    """
    slots = update.slots
    stored, position = origins.of(slots)
    used, record = np.unique(stored, return_inverse=True)
    records = origins.rows[used]
    offsets = offsets_of(records["num_tokens"].to_numpy())
    at = offsets[record] + position
    values, missing = np.zeros(offsets[-1], np.float32), np.ones(offsets[-1], np.bool_)
    values[at], missing[at] = token_shares[slots], False
    flat = to_arrow(values, pa.float32(), mask=missing)
    lists = pa.ListArray.from_arrays(to_arrow(offsets, pa.int32()), flat)
    rank = np.full(len(update.batch.names), -1)
    rank[rows["batch_row"].to_numpy()] = np.arange(len(rows))
    sequence = np.full(len(used), len(rows))
    np.minimum.at(sequence, record, rank[update.row])
    table = records.with_columns(
        *(pl.lit(value).alias(name) for name, value in keys.items()),
        share=np.bincount(record, token_shares[slots], len(used)),
        token_shares=pl.Series(lists),
    )
    return (
        table.select(*SHARES)
        .cast(SHARES)
        .with_columns(
            pl.Series("sequence", sequence + 1, pl.Int32),
            pl.Series("num_sequence_rows", np.bincount(sequence)[sequence], pl.Int32),
            *rows.select(OF_SEQUENCE)[sequence],
        )
    )


def traits(update: Linearized, norms: FloatArray, share: FloatArray) -> dict[str, FloatArray]:
    """Compute the traits by which a row may stand out, for each row of `update.rows` ([R] each).

    These are `share`; `gradient_norm`: L2 norm of the row's gradient; `advantage`: mean of
    |advantage|; `mismatch`: mean of |old_logprobs - rollout_logprobs| in nats, NaN without
    `rollout_logprobs`; `surprise`: mean of -logprobs in nats. Means are over the row's targets.
    """
    batch, logprobs, num_targets = update.batch, update.outputs, update.sums(update.targets)
    old = logprobs if batch.old_logprobs is None else batch.old_logprobs
    return {
        "share": share,
        "gradient_norm": norms,
        "advantage": update.sums(batch.advantages.abs().numpy()) / num_targets,
        "mismatch": update.sums((old - batch.rollout_logprobs).abs().numpy()) / num_targets,
        "surprise": update.sums(-logprobs.numpy()) / num_targets,
    }


def outlier_scores(traits: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Compute a score for each trait, which measures how far each of R rows stands out in it.

    The score of a share p of the gradient is 10 (|p| - 1 / R): a row whose share exceeds 1 / R by
    40 percentage points scores 4, whatever the shares of the other rows. The score of any other
    trait x is

        (x - median) / (q90 - median)

    where q90 is the 90 % quantile over all rows, so that a tenth of the rows has a score above 1.
    Gradient norms are compared by their logarithm, because they are products of the reduction's
    weight, the advantage and the gradient of the tokens' log-probabilities. Unknown traits score 0.
    """
    return {name: _score(name, values) for name, values in traits.items()}


def _score(name: str, values: FloatArray) -> FloatArray:
    if not len(values) or np.isnan(values).any():
        return np.zeros(len(values))
    if name == "share":
        return np.asarray(SHARE_SCALE * (np.abs(values) - 1 / len(values)))
    x = np.log(np.maximum(values, FLOOR)) if name == "gradient_norm" else values
    middle, high = np.quantile(x, [0.5, QUANTILE])
    return np.asarray((x - middle) / max(high - middle, 0.05 * abs(middle), FLOOR))


STANDS_OUT = 4.0
"""Minimum score at which a row is reported as standing out."""
NUM_UNITS = 3
"""Number of trajectories and of groups that the screen shows."""
MAJORITY = 0.5
"""Minimum share of the gradient at which a trajectory with several rows is reported."""


def summary(result: Blame, limit: int) -> dict[str, Any]:
    """Return the result for JSON, with the first `limit` rows, trajectories and groups."""
    return {
        "run": result.run,
        "update": result.update,
        "dataset": result.dataset,
        "num_rows": len(result.rows),
        "num_targets": result.num_targets,
        "gradient_norm": result.gradient_norm,
        "max_grad_norm": result.max_grad_norm,
        "finding": finding(result),
        "rows": result.rows.head(limit).to_dicts(),
        "trajectories": result.trajectories.head(limit).to_dicts(),
        "groups": result.groups.head(limit).to_dicts(),
    }


def finding(result: Blame) -> str:
    """Return a sentence that names the trajectory or row that stands out, or says that none does."""
    if (unit := _dominant(result)) is not None:
        rows, share = count(unit["num_rows"], "row"), f"{100 * unit['share']:.0f} %"
        return f"{unit['trajectory_id']} ({rows}) accounts for {share} of the gradient."
    first = result.rows.row(0, named=True)
    if first["score"] < STANDS_OUT:
        most = result.rows.sort(pl.col("share").abs(), descending=True).row(0, named=True)
        return f"No row stands out. {most['row']} has the largest share, {most['share']:.0%}."
    return f"{first['row']} stands out: {describe(first, result.rows)}."


def _dominant(result: Blame) -> dict[str, Any] | None:
    """Return the trajectory with several rows that accounts for most of the gradient, if any."""
    first = result.trajectories.row(0, named=True)
    if abs(first["share"]) < MAJORITY or first["num_rows"] == 1 or len(result.trajectories) < 3:
        return None
    return first


def replay_without(result: Blame, places: Mapping[str, str]) -> list[str] | None:
    """Return the words of the command that replays the update without the row or trajectory that stands out.

    None if none stands out, or if the update has no other row. `places` are as for `blame`.
    """
    first = result.rows.row(0, named=True)
    unit = _dominant(result)
    if (unit is None and first["score"] < STANDS_OUT) or len(result.rows) < 2:
        return None
    names = first["selectors"] if unit is None else [unit["trajectory_id"]]
    options = [("--without", name) for name in names]
    options += [("--set", f"{key}={path}") for key, path in places.items()]
    command = ["rollouts", "replay", result.run, "--update", str(result.update)]
    for name, value in options:  # a value may start as an option does
        command += [f"{name}={value}"] if value.startswith("-") else [name, value]
    return command


def describe(row: dict[str, Any], rows: pl.DataFrame) -> str:
    """Describe why a row stands out, relative to the median of all rows.

    Example:
        >>> rows = pl.DataFrame({"gradient_norm": [1.0, 1.0, 40.0]})
        >>> describe({"trait": "gradient_norm", "gradient_norm": 40.0, "share": 0.61}, rows)
        'its gradient has 40 times the median norm, and it accounts for 61 % of the gradient'
    """
    trait = row["trait"]
    name = "gradient_norm" if trait == "share" else trait
    makes = f"it accounts for {100 * row['share']:.0f} % of the gradient"
    value, middle = abs(row[name]), float(rows[name].abs().median() or 0.0)  # type: ignore[arg-type]
    ratio = value / middle if middle > 0 else inf
    times = f"{ratio:.{int(ratio < 9.5)}f} times" if middle > 0 else "far above"
    if trait == "share":
        return f"{makes}, with {times} the median norm"
    return f"{TRAITS[trait].format(value=row[name], times=times)}, and {makes}"


TRAITS = {
    "gradient_norm": "its gradient has {times} the median norm",
    "advantage": "its advantage is {value:+.2f}, {times} the median magnitude",
    "mismatch": "its log-probabilities differ from the sampler's by {value:.2g} nats per token,"
    " {times} the median",
    "surprise": "its tokens are improbable, with {value:.2g} nats per token, {times} the median",
}


NUMBERS = {
    "num_targets": ("tokens", "{:,}"),
    "advantage": ("advantage", "{:+.2f}"),
    "share": ("share", "{:.1%}"),
    "gradient_norm": ("norm", "{:.2g}"),
    "surprise": ("surprise", "{:.2f}"),
    "mismatch": ("mismatch", "{:.2g}"),
    "score": ("score", "{:.1f}"),
}
"""Title and format of the numbers of a row on the screen."""


def screen(result: Blame, limit: int) -> str:
    """Format the result for the terminal."""
    norm, most = f"{result.gradient_norm:.3g}", result.max_grad_norm
    norm += f", clipped to {most:g}" if result.gradient_norm > most else ""
    sizes = {"row": len(result.rows), "group": len(result.groups)}
    sizes["trained token"] = result.num_targets
    counts = ", ".join(count(number, noun) for noun, number in sizes.items())
    formats = NUMBERS
    if result.rows["mismatch"].is_nan().all():
        formats = {name: NUMBERS[name] for name in NUMBERS if name != "mismatch"}
    titles = (title for title, _ in formats.values())
    rows = bare_table("", "row", *titles, left={"row"}, folds={"row"})
    for number, row in enumerate(result.rows.head(limit).iter_rows(named=True), start=1):
        numbers = [text.format(row[name]) for name, (_, text) in formats.items()]
        style = "red" if row["score"] >= STANDS_OUT else ""
        rows.add_row(str(number), printable(row["row"]), *numbers, style=style)
    parts: list[RenderableType] = [
        Text(printable(f"{result.run}, update {result.update}: {counts}")),
        Text(f"norm of the gradient: {norm}"),
        Text(),
        Text(printable(finding(result)), style="bold"),
        *section("Rows", rows),
    ]
    num_trajectories = len(result.trajectories)
    if num_trajectories < len(result.rows):
        parts += section("Trajectories", _unit_table(result.trajectories, "trajectory"))
    if 1 < len(result.groups) < num_trajectories:
        parts += section("Groups", _unit_table(result.groups, "group"))
    return drawn(parts)


def _unit_table(units: pl.DataFrame, title: str) -> Table:
    table = bare_table(title, "rows", "share", left={title}, folds={title})
    for name, num_rows, share in units.head(NUM_UNITS).iter_rows():
        table.add_row(printable(name), f"{num_rows:,}", f"{share:.1%}")
    return table
