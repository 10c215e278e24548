"""List the tokens of a row with their masks, log-probabilities, rewards and recorded values."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from starlette.responses import Response

from pipelines.rewards import place_rewards_table
from pipelines.statistics.parting import sampled_mask
from pipelines.view.dataset import Dataset
from pipelines.view.responses import arrow_response
from pipelines.view.run_files import FLAGS, NUMBERS
from pipelines.view.runs import Run
from schemas.columns import PICTURES
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.ragged import Ragged

_COLUMNS = (
    *("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", "rewards"),
    *("segments", "policy_version", "policy_versions", PICTURES),
)


def tokens(
    dataset: Dataset, trajectory_id: str, step_index: int, run: Run | None, update: int | None
) -> Response:
    """Return one record per token of a row, with the values that an update recorded for it.

    The metadata has the row's pictures whose tokens are known, as JSON: their entries of `pictures`.
    """
    row = dataset.row(trajectory_id, step_index, dataset.present(*_COLUMNS))
    prompt = to_numpy(row.column("prompt_token_ids").chunk(0).flatten())
    response = Ragged.from_arrow(row.column("response_ids")).values
    num_prompt, ids = len(prompt), np.concatenate([prompt, response]).astype(np.int32)
    first = row.slice(0, 1).to_pylist() if "segments" in row.column_names else [{}]
    segments = first[0].get("segments")
    vocabulary = dataset.token_bytes
    masks = {
        "is_response": np.arange(len(ids)) >= num_prompt,
        "trained": _padded(num_prompt, Ragged.from_arrow(row.column("loss_mask")).values),
        "sampled": _padded(num_prompt, sampled_mask(len(response), segments)),
    }
    if vocabulary is None:
        offsets = pa.py_buffer(np.zeros(len(ids) + 1, np.int32))
        spelled = pa.Array.from_buffers(pa.binary(), len(ids), [None, offsets, pa.py_buffer(b"")])
    else:
        spelled = vocabulary.to_arrow(ids)
    size, whole = len(response), len(ids)
    columns: dict[str, Any] = {
        "id": to_arrow(ids),
        "bytes": spelled,
        **{name: to_arrow(mask.astype(np.bool_)) for name, mask in masks.items()},
        "rollout_logprob": _at_end(whole, _list(row, "rollout_logprobs"), pa.float32()),
        "reward": _at_end(whole, _rewards(row), pa.float64()),
        "policy_version": _at_end(whole, _versions(row, size, segments), pa.int32()),
    }
    if run is not None and update is not None:
        recorded = run.records(update, dataset).filter(
            (pl.col("trajectory_id") == trajectory_id)
            & (pl.col("step_index") == step_index)
            & (pl.col("loss_mask").list.len() == size)  # else the dataset has changed since
        )
        columns |= _recorded(recorded, whole)
    columns |= _shares(dataset, trajectory_id, step_index, whole)
    number = dataset.index.number(trajectory_id)
    begin, end = dataset.index.bounds(number)
    value = dataset.index.trajectories["return"][number]
    totals = {"prompt_tokens": num_prompt, "num_steps": end - begin}
    entries = row.column(PICTURES)[0].as_py() if PICTURES in row.column_names else None
    pictures = [entry for entry in entries or () if None not in entry.values()]
    table = pa.Table.from_arrays(list(columns.values()), list(columns))
    return arrow_response(
        table,
        **totals,
        pictures=json.dumps(pictures),
        decoded=int(vocabulary is not None),
        **{"return": math.nan if value is None else value},
    )


def _padded(num_prompt: int, mask: Any) -> Any:
    return np.concatenate([np.zeros(num_prompt, np.bool_), np.asarray(mask, np.bool_)])


def _list(row: pa.Table, name: str) -> pa.Array | None:
    """Return the row's list in a column; None if it is null or the column is absent."""
    if name not in row.column_names or not row.column(name).is_valid()[0].as_py():
        return None
    return row.column(name).chunk(0).flatten()


def _at_end(num_tokens: int, values: pa.Array | None, kind: pa.DataType) -> pa.Array:
    """Pad the values of a response with nulls for its prompt; without values, all are null."""
    if values is None:
        return pa.nulls(num_tokens, kind)
    return pa.concat_arrays([pa.nulls(num_tokens - len(values), kind), values.cast(kind)])


def _rewards(row: pa.Table) -> pa.Array | None:
    """Return per-token rewards: the stored ones, or each step's reward at its last token."""
    if (stored := _list(row, "rewards")) is not None:
        return stored
    if "reward" not in row.column_names or not row.column("reward").is_valid()[0].as_py():
        return None
    used = [n for n in ("response_ids", "reward", "segments") if n in row.column_names]
    return _list(place_rewards_table(row.select(used)), "rewards")


def _versions(
    row: pa.Table, num_tokens: int, segments: list[dict[str, Any]] | None
) -> pa.Array | None:
    """Return the policy version of each response token; the steps of a merged row may differ."""
    if (stored := _list(row, "policy_versions")) is not None:
        return stored
    if "policy_version" not in row.column_names:
        return None
    version = row.column("policy_version")[0].as_py()
    versions = np.full(num_tokens, -1 if version is None else version, np.int32)
    for segment in segments or ():
        version = segment.get("policy_version")
        if version is not None:
            versions[segment["start"] : segment["start"] + segment["length"]] = version
    return to_arrow(versions, mask=versions < 0)


def _shares(
    dataset: Dataset, trajectory_id: str, step_index: int, num_tokens: int
) -> dict[str, pa.Array]:
    """Return the tokens' shares of updates: one column for each table that contains the row."""
    columns = {}
    for column, rows in dataset.shares.items():
        of_row = rows.filter(
            (pl.col("trajectory_id") == trajectory_id) & (pl.col("step_index") == step_index)
        )
        if len(of_row):
            values = _list(of_row.select("token_shares").to_arrow(), "token_shares")
            columns[column] = _at_end(num_tokens, values, pa.float32())
    return columns


def _recorded(records: pl.DataFrame, num_tokens: int) -> dict[str, pa.Array]:
    """Return the values that an update recorded for a row; all null if it recorded none."""
    columns = {}
    for name, one in [*NUMBERS.items(), *((flag, flag) for flag in FLAGS)]:
        kind = pa.bool_() if name in FLAGS else pa.float32()
        values = _list(records[:1].select(name).to_arrow(), name) if len(records) else None
        columns[one] = _at_end(num_tokens, values, kind)
    return columns
