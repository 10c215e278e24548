"""Compare a replayed update with the records of the run, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelines.view.run_files import read_tokens
from schemas.errors import InputError, count
from schemas.run_metrics import LOOP_METRICS
from trainer.models.critic import VALUE_HEAD
from trainer.models.lora import WEIGHTS, adapter_weights
from trainer.run.checkpoint import write_model
from trainer.run.run import Run
from trainer.run.run_log import line_of
from trainer.run.state import Progress, load_progress, optimizer_tensors

TIMES = frozenset({"seconds", "tokens_per_s", "wait_seconds", "sync_seconds"})
SAMPLED = frozenset({"num_dropped_groups", *LOOP_METRICS} - {"iteration"}) - TIMES
"""Metrics of `rollouts rl` about sampling, which an update does not compute."""
ENVIRONMENT = "environment/"
KEYS = ("trajectory_id", "step_index")

Bits = npt.NDArray[Any]
Part = Literal["metrics", "tokens", "weights", "optimizer", "progress"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A replayed value that differs from the value that the run recorded."""

    part: Part
    name: str  # of the metric, column, tensor or field
    update: int
    recorded: Any  # the recorded value, or the first of several that differ; None: absent
    replayed: Any  # None: absent
    largest: float | None = None  # largest absolute difference; None if a value is not a number
    num_different: int = 1
    num_values: int = 1  # that were compared
    place: str = ""  # of the first value that differs; empty for a metric

    @property
    def sentence(self) -> str:
        """The difference in words.

        Example:
            >>> loss = {"part": "metrics", "name": "loss", "update": 7, "largest": 0.25}
            >>> Difference(**loss, recorded=1.0, replayed=1.25).sentence
            'update 7: the metric loss is 1.25, but 1.0 was recorded (a difference of 0.25)'
        """
        what = {"metrics": "metric", "tokens": "token record", "weights": "weight"}
        kind = what.get(self.part, self.part)
        size = "" if self.largest is None else f" (a difference of {self.largest:.3g})"
        values = f"{_shown(self.replayed)}, but {_shown(self.recorded)} was recorded"
        if self.part in ("metrics", "progress"):
            return f"update {self.update}: the {kind} {self.name} is {values}{size}"
        many = f"{self.num_different:,} of {count(self.num_values, 'value')} of the {kind} {self.name} differ"
        most = "" if self.largest is None else f", by at most {self.largest:.3g}"
        return f"update {self.update}: {many}{most}; the first, at {self.place}, is {values}"


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def as_recorded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as they are stored in a line of `metrics.jsonl`."""
    recorded: dict[str, Any] = json.loads(line_of(metrics))
    return recorded


def compared_metrics(line: Iterable[str], *, is_loop: bool) -> list[str]:
    """List the metrics of a line to compare: all except times and metrics of sampling."""
    names = (name for name in line if name not in TIMES)
    if is_loop:
        names = (n for n in names if n not in SAMPLED and not n.startswith(ENVIRONMENT))
    return list(names)


def metric_differences(
    line: Mapping[str, Any], metrics: Mapping[str, Any], update: int, *, is_loop: bool
) -> Iterator[Difference]:
    """Compare metrics with the line that the run wrote, in the order of that line."""
    replayed = as_recorded(metrics)
    for name in compared_metrics(dict.fromkeys((*line, *replayed)), is_loop=is_loop):
        then, now = line.get(name), replayed.get(name)
        if then != now or (name in line) != (name in replayed):
            difference = _unequal("metrics", name, update, then, now)
            if isinstance(then, int | float) and isinstance(now, int | float):
                difference = dataclasses.replace(difference, largest=abs(now - then))
            yield difference


def token_differences(run: Path, update: int, tokens: pa.Table | None) -> list[Difference]:
    """Compare an update's token records with the run's token records, column by column.

    Args:
        run: Directory of the run.
        update: Number of the update.
        tokens: Records of all rows of the replayed update.

    Raises:
        InputError: `readable_file`: the file of the run is damaged.
    """
    recorded = read_tokens(run, update)
    empty = pl.DataFrame(schema=recorded.drop("global_step", strict=False).schema)
    now = empty if tokens is None else pl.DataFrame(pl.from_arrow(tokens))
    keys = recorded.select(KEYS)
    now = keys.join(now, on=KEYS, how="left", maintain_order="left")
    names = [n for n in recorded.columns if n in now.columns and n not in ("dataset", *KEYS)]
    differences = (
        _column_difference(keys, recorded[name], now[name], update)
        for name in names
        if name != "global_step"
    )
    return [difference for difference in differences if difference]


def _column_difference(
    keys: pl.DataFrame, then: pl.Series, now: pl.Series, update: int
) -> Difference | None:
    """Compare a column of two tables of token records; None if all values are equal.

    `keys` identifies the rows of both tables.
    """
    name = then.name

    def row_of(at: int) -> str:
        trajectory, step = keys.row(int(at))
        return f"trajectory {trajectory}, step {step}"

    if not then.dtype.is_nested():
        return _difference("tokens", name, update, _numbers(then), _numbers(now), row_of)
    lengths = then.list.len().fill_null(0).to_numpy().astype(np.int64)
    if not np.array_equal(lengths, now.list.len().fill_null(0).to_numpy()):
        lists = ["no values" if one.null_count() else "values" for one in (then, now)]
        if lists[0] == lists[1]:
            lists = ["lists of the recorded lengths", "lists of different lengths"]
        return _unequal("tokens", name, update, *lists)
    row, start = np.repeat(np.arange(len(keys)), lengths), np.cumsum(lengths) - lengths

    def token_of(at: int) -> str:
        return f"{row_of(row[at])}, token {at - start[row[at]]}"

    before, after = (_numbers(c.drop_nulls().explode(empty_as_null=False)) for c in (then, now))
    return _difference("tokens", name, update, before, after, token_of)


def _numbers(values: pl.Series) -> Bits:
    """Convert a column to an array for comparing bits; null becomes a value that never occurs."""
    if values.dtype in (pl.Float32, pl.Float64):
        return values.fill_null(math.inf).to_numpy()  # a recorded value is never infinite
    if values.dtype == pl.String:
        return values.fill_null("").to_numpy().astype(str)
    return values.cast(pl.Int64).fill_null(-1).to_numpy()


def weight_differences(
    folder: Path, run: Run, update: int, part: Literal["policy", "critic"] = "policy"
) -> list[Difference]:
    """Compare the weights in memory with the weights in a model directory that the run wrote.

    Adapters are compared before they are merged.
    """
    unwrap, differences = run.accelerator.unwrap_model, list[Difference]()
    model: Any = unwrap(run.policy).model
    if part == "critic":
        critic: Any = unwrap(run.critic)
        model, head = critic.model, critic.value_head.state_dict()
        file = folder / VALUE_HEAD
        differences += _tensor_differences("weights", file, head, update, "value_head.")
    elif adapter := adapter_weights(model.state_dict()):
        file = folder / "adapter" / WEIGHTS
        return _tensor_differences("weights", file, adapter, update)
    state: dict[str, Tensor] = model.state_dict()
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.name != VALUE_HEAD]
    if not {name for path in files for name in _names(path)} <= state.keys():
        with tempfile.TemporaryDirectory() as scratch:  # names change when the model is saved
            saved = Path(scratch) / "model"
            write_model(saved, model, run.source)
            state = {name: t for path in saved.glob("*.safetensors") for name, t in _tensors(path)}
    for path in files:
        differences += _tensor_differences("weights", path, state, update)
    return differences


def state_differences(folder: Path, run: Run, progress: Progress, update: int) -> list[Difference]:
    """Compare optimizers and progress with a checkpoint's `state/`.

    Raises:
        InputError: `checkpoint_state`: the state cannot be read.
    """
    differences = list[Difference]()
    for name, tensors in optimizer_tensors(run.optimizers, keep=True).items():
        file = folder / f"{name}.safetensors"
        differences += _tensor_differences("optimizer", file, tensors, update)
    then = load_progress(folder)
    if then.num_mini_batches != progress.num_mini_batches:  # some were skipped after the update
        return differences
    of_position = ("batch", "mini_batch", "kl_coef")
    for name in ("global_step", "num_skipped", "trained", *of_position):
        before, now = (
            getattr(one.position if name in of_position else one, name) for one in (then, progress)
        )
        if before != now:
            differences.append(_unequal("progress", name, update, before, now))
    file = folder / "batch.safetensors"
    return differences + _tensor_differences("progress", file, progress.position.outputs, update)


def _unequal(part: Part, name: str, update: int, then: Any, now: Any) -> Difference:
    return Difference(part=part, name=name, update=update, recorded=then, replayed=now)


def _names(file: Path) -> list[str]:
    with _opened(file) as opened:
        return list(opened.keys())


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file one by one, so that a large file need not fit in memory."""
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118
            yield name, opened.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file of weights that the run saved."""
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        if file.parent.name == "state":
            finding = f"cannot read the state of the run: {reason}"
            raise InputError("checkpoint_state", str(file), finding) from error
        finding = f"cannot read the weights that the run saved: {reason}"
        hint = f"restore {file.parent} from a copy, or move it out of the run to replay without it"
        raise InputError("model_load", str(file), finding, hint=hint) from error


def _tensor_differences(
    part: Part, file: Path, tensors: Mapping[str, Tensor], update: int, prefix: str = ""
) -> list[Difference]:
    """Compare tensors with the tensors of a file; return a difference for each unequal tensor."""
    differences, recorded = list[Difference](), set[str]()
    for name, then in _tensors(file):
        recorded.add(name)
        now = tensors.get(name)
        if now is None or now.shape != then.shape or now.dtype != then.dtype:
            kinds = [
                None if t is None else f"{t.dtype} {list(t.shape)}".removeprefix("torch.")
                for t in (then, now)
            ]
            differences.append(_unequal(part, prefix + name, update, *kinds))
            continue
        arrays = _array(then), _array(now)
        one = _difference(part, prefix + name, update, *arrays, "index {}".format)
        differences += [one] if one else []
    missing = sorted(tensors.keys() - recorded) if part != "weights" else []
    return differences + [_unequal(part, name, update, None, "a tensor") for name in missing]


def _array(tensor: Tensor) -> Bits:
    flat = tensor.detach().cpu().contiguous().flatten()
    bits: Bits = (flat.float() if flat.dtype == torch.bfloat16 else flat).numpy()
    return bits


def _difference(
    part: Part, name: str, update: int, then: Bits, now: Bits, place: Callable[[int], str]
) -> Difference | None:
    """Compare two arrays of the same length bit by bit; None if they are equal."""
    if then.shape != now.shape:
        return _unequal(part, name, update, f"{len(then)} values", f"{len(now)} values")
    same = then == now
    if then.dtype.kind == "f":
        same = then.view(f"i{then.itemsize}") == now.view(f"i{now.itemsize}")
    at = np.flatnonzero(~same)
    if not len(at):
        return None
    largest = None
    if then.dtype.kind in "fiu":
        gap = np.abs(now[at].astype(np.float64) - then[at].astype(np.float64))
        largest = float(np.nan_to_num(gap, nan=math.inf).max())
    return Difference(
        part=part,
        name=name,
        update=update,
        recorded=then[at[0]].item(),
        replayed=now[at[0]].item(),
        largest=largest,
        num_different=len(at),
        num_values=len(then),
        place=place(int(at[0])),
    )
