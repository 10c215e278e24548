"""Compare a replayed update with the records of the run, bit for bit."""

from __future__ import annotations

import json
import math
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
from schemas.records import token_record_path
from schemas.run_metrics import LOOP_METRICS
from trainer.forensics.reconstruct import Reconstruction, iteration_of
from trainer.models.critic import VALUE_HEAD
from trainer.models.lora import WEIGHTS, adapter_weights, checkpoint_weights
from trainer.run.checkpoint import checkpoint_path
from trainer.run.resume import load_progress, optimizer_tensors
from trainer.run.run import Progress
from trainer.run.run_log import line_of
from trainer.update import Update

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
        now, then = ("nothing" if one is None else one for one in (self.replayed, self.recorded))
        values = f"{now}, but {then} was recorded"
        if self.part in ("metrics", "progress"):
            return f"update {self.update}: the {kind} {self.name} is {values}{size}"
        many = f"{self.num_different:,} of {count(self.num_values, 'value')} of the {kind} {self.name} differ"
        most = "" if self.largest is None else f", by at most {self.largest:.3g}"
        return f"update {self.update}: {many}{most}; the first, at {self.place}, is {values}"


def as_recorded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as they are stored in a line of `metrics.jsonl`."""
    recorded: dict[str, Any] = json.loads(line_of(metrics))
    return recorded


class Comparison:
    """Compares a replayed update with the records of the run bit for bit.

    Args:
        before: The run just before the update.

    Attributes:
        compared: Descriptions of the data that were compared.
        differences: All that differs, in the order of the updates.
        replayed: Metrics of the replayed update, as the run would have recorded them.
    """

    def __init__(self, before: Reconstruction) -> None:
        self._before, self._run, self._folder = before, before.run, before.recorded.path
        self._is_loop = before.recorded.num_iterations is not None
        self.compared, self.differences = list[str](), list[Difference]()
        self.replayed: dict[str, Any] = {}

    def compare(self, result: Update, *, is_changed: bool) -> None:
        """Compare the update, and those that were replayed before it, after the update was made.

        With `is_changed`, the models and optimizers are not those after the update.

        Raises:
            InputError: `readable_file`, `checkpoint_state`, `model_load`: a file of the run is damaged.
        """
        before, run, folder = self._before, self._run, self._folder
        metrics = iteration_of(before.recorded, run) | result.metrics
        self.replayed = as_recorded(metrics)
        for line, replayed in (*before.forwarded, (before.line, metrics)):
            self._metrics(line, as_recorded(replayed))
        self.compared.append(count(len(self.names(before.line)), "metric"))
        if before.forwarded:
            on_the_way = count(len(before.forwarded), "update")
            self.compared.append(f"the metrics of {on_the_way} before it")
        if token_record_path(folder, before.update).is_file():
            self._tokens(result.tokens)
            self.compared.append("the recorded tokens")
        if is_changed:
            return
        saved = checkpoint_path(folder, before.update)
        if saved.is_dir():
            self._weights(saved)
            if run.critic is not None:
                self.compared.append("its critic")
                critic: Any = run.accelerator.unwrap_model(run.critic)
                head, file = critic.value_head.state_dict(), saved / "critic" / VALUE_HEAD
                self._file("weights", file, head, "value_head.")
                self._model(file.parent, critic.model)
            if (saved / "state").is_dir():
                self._state(saved / "state", result.progress)
        version = folder / "weights" / f"version_{run.first_batch + 1}"
        if self._is_loop and before.pending.num_left == 1 and version.is_dir():
            self._weights(version)

    def names(self, line: Iterable[str]) -> list[str]:
        """List the metrics of a line to compare: all except times and metrics of sampling."""
        names = (name for name in line if name not in TIMES)
        if self._is_loop:
            names = (n for n in names if n not in SAMPLED and not n.startswith(ENVIRONMENT))
        return list(names)

    def _metrics(self, line: Mapping[str, Any], replayed: Mapping[str, Any]) -> None:
        for name in self.names(dict.fromkeys((*line, *replayed))):
            then, now = line.get(name), replayed.get(name)
            if then != now or (name in line) != (name in replayed):
                self._add("metrics", name, then, now, update=line["global_step"])

    def _tokens(self, tokens: pa.Table | None) -> None:
        """Compare the token records of all rows, column by column."""
        recorded = read_tokens(self._folder, self._before.update)
        recorded = recorded.drop("global_step", "dataset", strict=False)
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

    def _weights(self, folder: Path) -> None:
        """Compare the policy with a model directory; adapters before they are merged."""
        self.compared.append(f"the weights of {folder}")
        model = self._run.whole_policy.model
        if adapter := adapter_weights(model.state_dict()):
            self._file("weights", folder / "adapter" / WEIGHTS, adapter)
        else:
            self._model(folder, model)

    def _state(self, folder: Path, progress: Progress) -> None:
        """Compare optimizers and progress with a checkpoint's `state/`."""
        self.compared.append("its optimizers and position")
        for name, tensors in optimizer_tensors(self._run.optimizers, keep=True).items():
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
        state = dict(checkpoint_weights(model))
        for path in sorted(folder.glob("*.safetensors")):
            if path.name != VALUE_HEAD:
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
                self._add(part, prefix + name, _kind(then), now if now is None else _kind(now))
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
        values = {"update": self._before.update, "recorded": recorded, "replayed": replayed}
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


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _array(tensor: Tensor) -> Bits:
    flat = tensor.detach().cpu().contiguous().flatten()
    bits: Bits = (flat.float() if flat.dtype == torch.bfloat16 else flat).numpy()
    return bits


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file that the run saved, so that a large file need not fit in memory."""
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        if file.parent.name == "state":
            finding = f"cannot read the state of the run: {reason}"
            raise InputError("checkpoint_state", str(file), finding) from error
        finding = f"cannot read the weights that the run saved: {reason}"
        hint = f"restore {file.parent} from a copy, or move it out of the run to replay without it"
        raise InputError("model_load", str(file), finding, hint=hint) from error
