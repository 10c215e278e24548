"""Token records: the values that training writes for each target (`RUN/tokens/`).

With `[run] record_tokens`, each update (optimizer step) writes one file, `global_step_N.parquet`.
N is the `global_step` of the update's line in `metrics.jsonl`: the number of optimizer steps
including this one. A target is a response token that this update trained on. A file has one record
for each stored row of the dataset that has a recorded target, in the order of the rows. `dataset`,
`trajectory_id` and `step_index` identify the row, with any `sequence_layout`.

All list columns are aligned with the row's `response_ids`. Numbers are float32, as they entered the
loss, and null where the token is not a target. If a run does not compute a value, the entire list is
null in all records.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from schemas.columns import Column, Length

TOKENS = "tokens"
"""Directory of the token records in a run."""
PREFIX, SUFFIX = "global_step_", ".parquet"

_FLAGS, _NUMBERS = pa.list_(pa.bool_()), pa.list_(pa.float32())


def _per_token(name: str, kind: pa.DataType, meaning: str, *, nullable: bool = True) -> Column:
    return Column(name=name, type=kind, nullable=nullable, length=Length.RESPONSE, meaning=meaning)


TOKEN_RECORD_COLUMNS: tuple[Column, ...] = (
    Column(name="dataset", type=pa.string(), meaning="path of the dataset, as configured"),
    Column(name="instance_id", type=pa.string(), meaning="group of the row"),
    Column(name="trajectory_id", type=pa.string(), meaning="trajectory of the row"),
    Column(name="step_index", type=pa.int32(), meaning="index of the row in its trajectory"),
    Column(
        name="row_digest",
        type=pa.int64(),
        meaning="digest of the stored row, to detect a dataset whose row has changed",
    ),
    _per_token("loss_mask", _FLAGS, "true for targets of this update", nullable=False),
    _per_token("advantages", _NUMBERS, "advantage; null if the loss does not use advantages"),
    _per_token("weights", _NUMBERS, "weight of the target's loss, from `loss.reduction`"),
    _per_token(
        "old_logprobs",
        _NUMBERS,
        "log-probability under the policy at the start of the batch, nats; null if unused",
    ),
    _per_token("logprobs", _NUMBERS, "log-probability under the policy before this step, nats"),
    _per_token(
        "ref_logprobs",
        _NUMBERS,
        "log-probability under the reference, nats; null without a KL divergence",
    ),
    _per_token(
        "importance_weights",
        _NUMBERS,
        "exp(logprobs - old_logprobs), with the exponent clamped to +-20",
    ),
    _per_token(
        "correction_weights",
        _NUMBERS,
        "factor that corrects for sampler mismatch; 0 where rejected, null without correction",
    ),
    _per_token("entropy", _NUMBERS, "entropy of the policy's distribution, nats"),
    _per_token(
        "losses",
        _NUMBERS,
        "loss before `weights`, including correction, KL and entropy terms: the sum of"
        " weights x losses over all targets is the update's `loss`",
    ),
    _per_token("clipped", _FLAGS, "true if the policy loss clipped the target"),
    _per_token("rejected", _FLAGS, "true if the correction masked the target"),
)
"""Columns of a token-record file, declared like the columns of the rollout table."""


def token_record_schema() -> pa.Schema:
    """Return the Arrow schema of a token-record file."""
    return pa.schema([pa.field(c.name, c.type, nullable=c.nullable) for c in TOKEN_RECORD_COLUMNS])


def token_record_path(run: Path, global_step: int) -> Path:
    """Return the path of an update's token records; the file exists only if tokens were recorded.

    Example:
        >>> token_record_path(Path("run"), 3).as_posix()
        'run/tokens/global_step_3.parquet'
    """
    return run / TOKENS / f"{PREFIX}{global_step}{SUFFIX}"


def token_record_steps(run: Path) -> list[int]:
    """List the `global_step` of each update of a run that has token records, in order."""
    names = (path.stem.removeprefix(PREFIX) for path in (run / TOKENS).glob(f"{PREFIX}*{SUFFIX}"))
    return sorted(int(name) for name in names if name.isdecimal())
