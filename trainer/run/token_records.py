"""Record what each trained token contributed to an update: `RUN/tokens/global_step_N.parquet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from safetensors.torch import load, save
from torch import Tensor

from rollout_io.dataset.filesystems import whole
from schemas.errors import count
from schemas.numpy_arrays import to_arrow
from schemas.ragged import BoolArray, offsets_of
from schemas.records import TOKENS, token_record_path, token_record_schema, token_record_steps
from trainer.algorithms.losses import Targets, probability_ratio
from trainer.batch import Batch
from trainer.batches.chains import Origins
from trainer.batches.forest import Forest
from trainer.batches.overlap import CopyToCpu, to_device
from trainer.config.sections import LossConfig
from trainer.distributed.processes import gather_in_main, over_processes
from trainer.run.directory import published
from trainer.run.messages import say

RecordTokens = Literal["none", "sampled", "all"]
SAMPLED_GROUPS = 4
"""Number of groups that `record_tokens = "sampled"` records per update."""
KEYS = ("dataset", "instance_id", "trajectory_id")
MB = 1_000_000


class TokenRecorder:
    """Collects the values that enter the loss of one update, for the targets to record.

    Each process adds the values of its micro-batches. Values are detached copies on the CPU.

    Args:
        recorded: [T] bool, the targets to record; see `recorder_of`.
    """

    def __init__(self, recorded: BoolArray) -> None:
        self.recorded = torch.from_numpy(recorded)
        self._parts: list[tuple[Tensor, CopyToCpu]] = []

    def add(
        self,
        slots: Tensor,
        targets: Targets,
        columns: Mapping[str, Tensor],
        batch: Batch,
        loss: LossConfig,
    ) -> None:
        """Add the values of a micro-batch's M targets: `targets`, and the columns of `objective`."""
        assert targets.weights is not None
        values = {
            "logprobs": targets.logprobs.detach(),
            "entropy": columns["policy_entropy"],
            "clipped": columns["clip_ratio"],
            "losses": columns["unweighted_loss"],
            "weights": targets.weights,
        }
        if "correction_weights" in columns:
            values["correction_weights"] = columns["correction_weights"]
            values["rejected"] = columns["correction_weights"] == 0
        if "advantages" in loss.inputs:
            values["advantages"] = targets.advantages
        if loss.needs_old_logprobs or batch.old_logprobs is not None:
            values["old_logprobs"] = targets.old_logprobs
            values["importance_weights"] = probability_ratio(
                values["logprobs"], targets.old_logprobs
            )
        if targets.ref_logprobs is not None:
            values["ref_logprobs"] = targets.ref_logprobs
        picked = self.recorded[slots].nonzero()[:, 0]
        if not len(picked):
            return
        on_device = to_device(picked, next(iter(values.values())).device)
        arriving = CopyToCpu({name: column.detach()[on_device] for name, column in values.items()})
        self._parts.append((slots[picked], arriving))

    def gathered(self, accelerator: Accelerator, batch: Batch) -> dict[str, Tensor]:
        """Gather the values of all processes in the main process, [K] by column, sorted by `slots`.

        `slots` are indices in the response tokens of all processes. The result is empty if no target
        was recorded, and in other processes. All processes must call this together.
        """
        columns = _concatenated([part.read() | {"slots": slots} for slots, part in self._parts])
        if accelerator.num_processes > 1:
            if columns:
                columns["slots"] = torch.from_numpy(batch.global_slots)[columns["slots"]]
            shares = gather_in_main(accelerator, save(columns))
            columns = _concatenated([part for part in map(load, shares) if part])
        order = columns["slots"].argsort() if columns else None
        return {name: values[order] for name, values in columns.items()}


def recorder_of(
    accelerator: Accelerator,
    batch: Batch,
    forests: Sequence[Forest],
    how: RecordTokens,
    *,
    seed: int,
    global_step: int,
) -> TokenRecorder | None:
    """Return a recorder for an update; None if nothing is recorded.

    Args:
        accelerator: The Accelerator of the run.
        batch: The batch.
        forests: Micro-batches of the update.
        how: Targets to record: none, the targets of `SAMPLED_GROUPS` groups, or all.
        seed: Seed of the run, which chooses the groups together with `global_step`.
        global_step: Number of the update.
    """
    if how == "none":
        return None
    recorded = np.zeros(len(batch.trains), np.bool_)
    for forest in forests:
        recorded[forest.target_slot.numpy()] = True
    if how == "sampled":
        slots = np.flatnonzero(recorded)
        group = batch.group[batch.responses.row_of(slots)]
        present = np.bincount(group, minlength=len(batch.group_names))
        groups = np.flatnonzero(over_processes(accelerator, present, "sum"))
        order = np.random.default_rng((seed, global_step)).permutation(groups)
        recorded[slots] = np.isin(group, order[:SAMPLED_GROUPS])
    return TokenRecorder(recorded)


def token_records(dataset: str, origins: Origins, values: Mapping[str, Tensor]) -> pa.Table:
    """Build the records of an update: see `schemas.records`.

    Args:
        dataset: Path of the dataset.
        origins: Dataset rows that store the batch's tokens.
        values: [K] values of the recorded targets, by column, and their `slots`.
    """
    row, position = origins.of(values["slots"].numpy())
    used, record = np.unique(row, return_inverse=True)
    rows = origins.rows[used]
    offsets = offsets_of(rows["num_tokens"].to_numpy())
    at = offsets[record] + position
    is_target = np.zeros(offsets[-1], np.bool_)
    is_target[at] = True

    def per_token(field: pa.Field) -> pa.Array:
        if field.name == "loss_mask":
            return _lists(is_target, None, offsets, field.type)
        if field.name not in values:
            return pa.nulls(len(rows), field.type)
        column = values[field.name].numpy()
        spread = np.zeros(len(is_target), column.dtype)
        spread[at] = column
        return _lists(spread, ~is_target, offsets, field.type)

    schema = token_record_schema()
    columns = {"dataset": pa.array([dataset] * len(rows), pa.string())}
    columns |= {name: rows[name].to_arrow().cast(schema.field(name).type) for name in KEYS[1:]}
    columns["step_index"] = to_arrow(rows["step_index"].to_numpy(), pa.int32())
    columns["row_digest"] = rows["row_digest"].to_arrow()
    columns |= {field.name: per_token(field) for field in schema if field.name not in columns}
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def write_token_records(out: Path, global_step: int, records: pa.Table) -> None:
    """Write the records of an update atomically."""
    path = token_record_path(out, global_step)
    path.parent.mkdir(exist_ok=True)
    with whole(path) as partial:
        pq.write_table(
            records,
            partial,
            compression="zstd",
            use_dictionary=list(KEYS),
            write_page_checksum=True,
        )


def discard_token_records(out: Path, global_step: int) -> None:
    """Delete the records of later updates, and incomplete files of killed runs."""
    for path in (out / TOKENS).glob(".*.parquet.partial"):
        path.unlink()
    for later in token_record_steps(out):
        if later > global_step:
            token_record_path(out, later).unlink(missing_ok=True)  # names of others may differ


def say_size(out: Path) -> None:
    """Log the number of recorded updates, and the size of their files."""
    paths = [token_record_path(out, step) for step in token_record_steps(out)]
    if paths:
        size = sum(path.stat().st_size for path in paths)
        shown = f"{size / MB:,.1f} MB" if size >= MB else f"{size / 1000:.0f} kB"
        where = f"{published(out) or out}/{TOKENS}"
        say(f"recorded the tokens of {count(len(paths), 'update')} in {where} ({shown})")


def _concatenated(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = parts[0] if parts else ()
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _lists(
    values: npt.NDArray[Any],
    missing: BoolArray | None,
    offsets: npt.NDArray[np.int64],
    kind: pa.DataType,
) -> pa.Array:
    flat = to_arrow(values, kind.value_type, mask=missing)
    return pa.ListArray.from_arrays(to_arrow(offsets, pa.int32()), flat, type=kind)
