"""Compare a replayed update with the records of the run, bit for bit."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
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
PROGRESS = (
    *("global_step", "num_skipped", "trained_groups"),
    *("batches_done", "mini_batches_done", "kl_coef"),
)
"""Fields of the progress and of its position that are compared."""

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


@dataclass(slots=True)
class Comparison:
    """Compares a run after a replayed update with its records bit for bit, and collects what differs."""

    run: Run
    update: int
    differences: list[Difference] = field(default_factory=list)

    def metrics(
        self, line: Mapping[str, Any], metrics: Mapping[str, Any], *, is_loop: bool
    ) -> None:
        """Compare metrics with the line that the run wrote."""
        replayed = as_recorded(metrics)
        for name in compared_metrics(dict.fromkeys((*line, *replayed)), is_loop=is_loop):
            then, now = line.get(name), replayed.get(name)
            if then != now or (name in line) != (name in replayed):
                self._add("metrics", name, then, now, update=line["global_step"])

    def tokens(self, folder: Path, tokens: pa.Table | None) -> None:
        """Compare the token records of all rows with those in a run's directory, column by column.

        Raises:
            InputError: `readable_file`: the file of the run is damaged.
        """
        recorded = read_tokens(folder, self.update).drop("global_step", "dataset", strict=False)
        empty = pl.DataFrame(schema=recorded.schema)
        replayed = empty if tokens is None else pl.DataFrame(pl.from_arrow(tokens))
        keys = recorded.select(KEYS)
        replayed = keys.join(replayed, on=KEYS, how="left", maintain_order="left")
        for name in [n for n in recorded.columns if n in replayed.columns and n not in KEYS]:
            is_list = recorded[name].dtype.is_nested()
            values = pl.col(name) if is_list else pl.concat_list(name)
            then, now = (table.select(values).to_series() for table in (recorded, replayed))
            if not then.list.len().equals(now.list.len()):
                self._add("tokens", name, "lists", "lists of other lengths")
                continue
            ends = then.list.len().fill_null(0).cast(pl.Int64).cum_sum().to_numpy()
            before, after = (one.drop_nulls().explode(empty_as_null=False) for one in (then, now))
            place = partial(_token, keys, ends)
            self._arrays("tokens", name, _numbers(before), _numbers(after), place)

    def weights(self, folder: Path) -> None:
        """Compare the policy with a model directory that the run wrote; adapters before they are merged."""
        model: Any = self.run.accelerator.unwrap_model(self.run.policy).model
        if adapter := adapter_weights(model.state_dict()):
            self._file("weights", folder / "adapter" / WEIGHTS, adapter)
        else:
            self._model(folder, model)

    def critic(self, folder: Path) -> None:
        """Compare the critic with the directory of a critic that the run wrote."""
        critic: Any = self.run.accelerator.unwrap_model(self.run.critic)
        self._file("weights", folder / VALUE_HEAD, critic.value_head.state_dict(), "value_head.")
        self._model(folder, critic.model)

    def state(self, folder: Path, progress: Progress) -> None:
        """Compare optimizers and progress with a checkpoint's `state/`.

        Raises:
            InputError: `checkpoint_state`: the state cannot be read.
        """
        for name, tensors in optimizer_tensors(self.run.optimizers, keep=True).items():
            self._file("optimizer", folder / f"{name}.safetensors", tensors)
        then = load_progress(folder)
        if then.num_mini_batches != progress.num_mini_batches:  # some were skipped after the update
            return
        for name in PROGRESS:
            before, now = (
                getattr(one if hasattr(one, name) else one.position, name)
                for one in (then, progress)
            )
            if before != now:
                self._add("progress", name, before, now)
        self._file("progress", folder / "batch.safetensors", progress.position.outputs)

    def _model(self, folder: Path, model: Any) -> None:
        state: dict[str, Tensor] = model.state_dict()
        files = [path for path in sorted(folder.glob("*.safetensors")) if path.name != VALUE_HEAD]
        if not {name for path in files for name, _ in _tensors(path, reads=False)} <= state.keys():
            with tempfile.TemporaryDirectory() as scratch:  # names change when the model is saved
                saved = Path(scratch) / "model"
                write_model(saved, model, self.run.source)
                written = (_tensors(path) for path in saved.glob("*.safetensors"))
                state = dict(chain.from_iterable(written))
        for path in files:
            self._file("weights", path, state)

    def _file(
        self, part: Part, file: Path, tensors: Mapping[str, Tensor], prefix: str = ""
    ) -> None:
        """Compare tensors with the tensors of a file."""
        recorded = set[str]()
        for name, then in _tensors(file):
            recorded.add(name)
            now = tensors.get(name)
            if now is None or now.shape != then.shape or now.dtype != then.dtype:
                self._add(part, prefix + name, _kind(then), _kind(now))
            else:
                self._arrays(part, prefix + name, _array(then), _array(now), "index {}".format)
        for name in sorted(tensors.keys() - recorded) if part != "weights" else ():
            self._add(part, name, None, "a tensor")

    def _arrays(
        self, part: Part, name: str, then: Bits, now: Bits, place: Callable[[int], str]
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
        size = {"num_different": len(at), "num_values": len(then), "largest": largest}
        values = then[at[0]].item(), now[at[0]].item()
        self._add(part, name, *values, place=place(int(at[0])), **size)

    def _add(self, part: Part, name: str, recorded: Any, replayed: Any, **more: Any) -> None:
        values = {"update": self.update, "recorded": recorded, "replayed": replayed}
        if all(isinstance(value, int | float) for value in (recorded, replayed)):
            values["largest"] = abs(replayed - recorded)
        self.differences.append(Difference(part=part, name=name, **values | more))


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
