"""Compare a replayed update with the records of the run, bit for bit."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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
from schemas.ragged import IntArray
from schemas.run_metrics import LOOP_METRICS
from trainer.models.critic import VALUE_HEAD
from trainer.models.lora import WEIGHTS, adapter_weights
from trainer.run.checkpoint import write_model
from trainer.run.resume import load_progress, optimizer_tensors
from trainer.run.run import Progress, Run
from trainer.run.run_log import line_of

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


class Comparison:
    """Compares a replayed run with its records bit for bit, and collects what differs, in order."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []

    def metrics(
        self, line: Mapping[str, Any], metrics: Mapping[str, Any], *, is_loop: bool
    ) -> None:
        """Compare metrics with the line that the run wrote."""
        replayed = as_recorded(metrics)
        for name in compared_metrics(dict.fromkeys((*line, *replayed)), is_loop=is_loop):
            then, now = line.get(name), replayed.get(name)
            if then != now or (name in line) != (name in replayed):
                self._add("metrics", name, line["global_step"], then, now)

    def tokens(self, run: Path, update: int, tokens: pa.Table | None) -> None:
        """Compare an update's token records with the run's token records, column by column.

        Args:
            run: Directory of the run.
            update: Number of the update.
            tokens: Records of all rows of the replayed update.

        Raises:
            InputError: `readable_file`: the file of the run is damaged.
        """
        recorded = read_tokens(run, update).drop("global_step", "dataset", strict=False)
        empty = pl.DataFrame(schema=recorded.schema)
        replayed = empty if tokens is None else pl.DataFrame(pl.from_arrow(tokens))
        keys = recorded.select(KEYS)
        replayed = keys.join(replayed, on=KEYS, how="left", maintain_order="left")
        for name in [n for n in recorded.columns if n in replayed.columns and n not in KEYS]:
            is_list = recorded[name].dtype.is_nested()
            values = pl.col(name) if is_list else pl.concat_list(name)
            then, now = (table.select(values).to_series() for table in (recorded, replayed))
            if not then.list.len().equals(now.list.len()):
                self._add("tokens", name, update, "lists", "lists of other lengths")
                continue
            ends = then.list.len().fill_null(0).cast(pl.Int64).cum_sum().to_numpy()
            before, after = (
                _numbers(column.drop_nulls().explode(empty_as_null=False)) for column in (then, now)
            )
            self._arrays("tokens", name, update, before, after, partial(_token, keys, ends))

    def weights(self, folder: Path, run: Run, update: int) -> None:
        """Compare the policy in memory with a model directory that the run wrote.

        Adapters are compared before they are merged.
        """
        model: Any = run.accelerator.unwrap_model(run.policy).model
        if adapter := adapter_weights(model.state_dict()):
            self._file("weights", folder / "adapter" / WEIGHTS, adapter, update)
        else:
            self._model(folder, model, run, update)

    def critic(self, folder: Path, run: Run, update: int) -> None:
        """Compare the critic in memory with the directory of a critic that the run wrote."""
        critic: Any = run.accelerator.unwrap_model(run.critic)
        head = critic.value_head.state_dict()
        self._file("weights", folder / VALUE_HEAD, head, update, "value_head.")
        self._model(folder, critic.model, run, update)

    def state(self, folder: Path, run: Run, progress: Progress, update: int) -> None:
        """Compare optimizers and progress with a checkpoint's `state/`.

        Raises:
            InputError: `checkpoint_state`: the state cannot be read.
        """
        for name, tensors in optimizer_tensors(run.optimizers, keep=True).items():
            self._file("optimizer", folder / f"{name}.safetensors", tensors, update)
        then = load_progress(folder)
        if then.num_mini_batches != progress.num_mini_batches:  # some were skipped after the update
            return
        for name in (
            "global_step",
            "num_skipped",
            "trained_groups",
            "batch",
            "mini_batch",
            "kl_coef",
        ):
            before, now = (
                getattr(one if hasattr(one, name) else one.position, name)
                for one in (then, progress)
            )
            if before != now:
                self._add("progress", name, update, before, now)
        outputs = progress.position.outputs
        self._file("progress", folder / "batch.safetensors", outputs, update)

    def _model(self, folder: Path, model: Any, run: Run, update: int) -> None:
        state: dict[str, Tensor] = model.state_dict()
        files = [path for path in sorted(folder.glob("*.safetensors")) if path.name != VALUE_HEAD]
        if not {name for path in files for name, _ in _tensors(path, reads=False)} <= state.keys():
            with tempfile.TemporaryDirectory() as scratch:  # names change when the model is saved
                saved = Path(scratch) / "model"
                write_model(saved, model, run.source)
                state = dict(
                    pair for path in saved.glob("*.safetensors") for pair in _tensors(path)
                )
        for path in files:
            self._file("weights", path, state, update)

    def _file(
        self, part: Part, file: Path, tensors: Mapping[str, Tensor], update: int, prefix: str = ""
    ) -> None:
        """Compare tensors with the tensors of a file."""
        recorded = set[str]()
        for name, then in _tensors(file):
            recorded.add(name)
            now = tensors.get(name)
            if now is None or now.shape != then.shape or now.dtype != then.dtype:
                self._add(part, prefix + name, update, _kind(then), _kind(now))
            else:
                arrays = _array(then), _array(now)
                self._arrays(part, prefix + name, update, *arrays, "index {}".format)
        for name in sorted(tensors.keys() - recorded) if part != "weights" else ():
            self._add(part, name, update, None, "a tensor")

    def _arrays(
        self, part: Part, name: str, update: int, then: Bits, now: Bits, place: Callable[[int], str]
    ) -> None:
        """Compare two arrays of the same length."""
        same = then == now
        if then.dtype.kind == "f":
            same = then.view(f"i{then.itemsize}") == now.view(f"i{now.itemsize}")
        at, largest = np.flatnonzero(~same), None
        if not len(at):
            return
        if then.dtype.kind in "fiu":
            gap = np.abs(now[at].astype(np.float64) - then[at].astype(np.float64))
            largest = float(np.nan_to_num(gap, nan=math.inf).max())
        self._add(
            part,
            name,
            update,
            then[at[0]].item(),
            now[at[0]].item(),
            largest=largest,
            num_different=len(at),
            num_values=len(then),
            place=place(int(at[0])),
        )

    def _add(
        self, part: Part, name: str, update: int, recorded: Any, replayed: Any, **more: Any
    ) -> None:
        values = {"recorded": recorded, "replayed": replayed}
        if all(isinstance(value, int | float) for value in values.values()):
            more = {"largest": abs(replayed - recorded)} | more
        self.differences.append(Difference(part=part, name=name, update=update, **values, **more))


def _token(keys: pl.DataFrame, ends: IntArray, at: int) -> str:
    """Describe the place of a token, given the keys of the rows and the ends of their tokens."""
    row = int(np.searchsorted(ends, at, side="right"))
    trajectory, step = keys.row(row)
    return f"trajectory {trajectory}, step {step}, token {at - (ends[row - 1] if row else 0)}"


def _numbers(values: pl.Series) -> Bits:
    """Convert a column to an array for comparing bits; null becomes a value that never occurs."""
    if values.dtype in (pl.Float32, pl.Float64):
        return values.fill_null(math.inf).to_numpy()  # a recorded value is never infinite
    if values.dtype == pl.String:
        return values.fill_null("").to_numpy().astype(str)
    return values.cast(pl.Int64).fill_null(-1).to_numpy()


def _kind(tensor: Tensor | None) -> str | None:
    text = None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
    return text and text.removeprefix("torch.")


def _array(tensor: Tensor) -> Bits:
    flat = tensor.detach().cpu().contiguous().flatten()
    bits: Bits = (flat.float() if flat.dtype == torch.bfloat16 else flat).numpy()
    return bits


def _tensors(file: Path, *, reads: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file that the run saved, so that a large file need not fit in memory."""
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name) if reads else torch.empty(0)
    except (OSError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        if file.parent.name == "state":
            finding = f"cannot read the state of the run: {reason}"
            raise InputError("checkpoint_state", str(file), finding) from error
        finding = f"cannot read the weights that the run saved: {reason}"
        hint = f"restore {file.parent} from a copy, or move it out of the run to replay without it"
        raise InputError("model_load", str(file), finding, hint=hint) from error
