"""Columns that the export to slime keeps in a sample's `metadata`, read back.

    {"trajectory_id": "a_0", "token_source": "engine", "temperature": 1.0, "trainer_logprobs": [...], ...}

Only samples that were exported are read in this way; slime and its users put anything into `metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from rollout_io.formats.base import Step
from rollout_io.formats.parsing.tokens import INT32_MAX, broken, logprob_array, num_ids
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import InputError, count

_Int32 = Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
_MADE = {"label", "status", "weight_versions"}  # columns that every sample gives


class Exported(msgspec.Struct, gc=False):
    """The columns of a row; `trajectory_id` and `token_source` tell that it was exported."""

    trajectory_id: str
    token_source: str
    policy_versions: list[_Int32] | None = None
    trainer_logprobs: list[float] | None = None
    teacher_token_ids: list[list[_Id]] | None = None
    teacher_logprobs: list[list[float]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int32 | None = None
    sampling_extra: str | None = None
    agent: str | None = None
    stop_reason: str | None = None
    metrics: dict[str, float] | None = None


_BY_TOKEN = ("policy_versions", "trainer_logprobs", "teacher_token_ids", "teacher_logprobs")


def _exported(metadata: Mapping[Any, Any], where: str) -> Exported | None:
    """Return the columns in the metadata of an exported sample; None for any other sample."""
    if not {"trajectory_id", "token_source"} <= metadata.keys():
        return None
    try:
        return msgspec.convert(metadata, Exported, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InputError("record_type", f"{where}, metadata", str(error)) from None


def read_back(step: Step, metadata: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """Set the columns of a step, and strings in user columns; return what else the metadata holds."""
    columns = _exported(metadata, where)
    if columns is None:
        return dict(metadata)
    num_tokens = num_ids(step.response_ids)
    for name in _BY_TOKEN:
        values = getattr(columns, name)
        if values is not None and len(values) != num_tokens:
            finding = f"metadata.{name}: {count(len(values), 'value')}"
            raise broken("lengths_align", where, finding, f"{num_tokens}, one per response token")
    for name in Exported.__struct_fields__:
        value = getattr(columns, name)
        if value is not None and name != "trajectory_id":
            setattr(step, name, value)
    if columns.policy_versions is not None:
        step.policy_versions = np.array(columns.policy_versions, np.int32)
    if columns.trainer_logprobs is not None:
        step.trainer_logprobs = logprob_array(columns.trainer_logprobs, num_tokens, where)
    others = {name: v for name, v in metadata.items() if name not in COLUMN_BY_NAME}
    step.columns = {
        name: pa.scalar(value, pa.string())
        for name, value in others.items()
        if isinstance(name, str) and isinstance(value, str) and name not in _MADE
    }
    return others
