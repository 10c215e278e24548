"""Tables about the rows of a dataset: token records, verdicts of audits, shares of updates.

`dataset`, `trajectory_id` and `step_index` identify the row of the dataset (for merged rows, the
step as `unmerge` numbers it); `row_digest` shows whether it has changed since.

Token records (`RUN/tokens/`): with `[run] record_tokens`, each update (optimizer step) writes one
file, `global_step_N.parquet`. N is the `global_step` of the update's line in `metrics.jsonl`: the
number of optimizer steps including this one. A target is a response token that this update trained
on. A file has one record for each stored row of the dataset that has a recorded target, in the order
of the rows, with any `sequence_layout`. All list columns are aligned with the row's `response_ids`.
Numbers are float32, as they entered the loss, and null where the token is not a target. If a run
does not compute a value, the entire list is null in all records.

Verdicts (`rollouts audit`): one row for each sampled span. An audit compares the stored
log-probabilities of a span with log-probabilities under candidate weights and settings. Positions
are indices into the row's `response_ids`.

Shares (`rollouts blame`): one row for each row of an update, with its share of the update. The table
may have further numeric columns, which the viewer also shows.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from schemas.columns import Column, optional, per_token

TOKENS = "tokens"
"""Directory of the token records in a run."""
PREFIX, SUFFIX = "global_step_", ".parquet"
_ROW = (
    Column("instance_id", pa.string(), "group of the row"),
    Column("trajectory_id", pa.string(), "trajectory of the row"),
    Column("step_index", pa.int32(), "index of the row in its trajectory"),
)

TOKEN_RECORD_COLUMNS: tuple[Column, ...] = (
    Column("dataset", pa.string(), "path of the dataset, as configured"),
    *_ROW,
    Column(
        "row_digest",
        pa.int64(),
        "digest of the stored row, to detect a dataset whose row has changed",
    ),
    per_token("loss_mask", pa.bool_(), "true for targets of this update", nullable=False),
    per_token("advantages", pa.float32(), "advantage; null if the loss does not use advantages"),
    per_token("weights", pa.float32(), "weight of the target's loss, from `loss.reduction`"),
    per_token(
        "old_logprobs",
        pa.float32(),
        "log-probability under the policy at the start of the batch, nats; null if unused",
    ),
    per_token("logprobs", pa.float32(), "log-probability under the policy before this step, nats"),
    per_token(
        "ref_logprobs",
        pa.float32(),
        "log-probability under the reference, nats; null without a KL divergence",
    ),
    per_token(
        "importance_weights",
        pa.float32(),
        "exp(logprobs - old_logprobs), with the exponent clamped to +-20",
    ),
    per_token(
        "correction_weights",
        pa.float32(),
        "factor that corrects for sampler mismatch; 0 where rejected, null without correction",
    ),
    per_token("entropy", pa.float32(), "entropy of the policy's distribution, nats"),
    per_token(
        "losses",
        pa.float32(),
        "loss before `weights`, including correction, KL and entropy terms: the sum of"
        " weights x losses over all targets is the update's `loss`",
    ),
    per_token("clipped", pa.bool_(), "true if the policy loss clipped the target"),
    per_token("rejected", pa.bool_(), "true if the correction masked the target"),
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


AUDIT = "audit"
"""Directory of the verdicts in a run: `RUN/audit/*.parquet`."""

MEANINGS = {
    "as_labelled": "sampled as labelled",
    "version": "sampled by other weights than labelled",
    "swap": "the weights changed during the response",
    "temperature": "sampled at another temperature",
    "truncation": "sampled with another top_p, top_k or min_p",
    "raw_logprobs": "log-probabilities before temperature and truncation",
    "processed_logprobs": "log-probabilities after temperature and truncation",
    "offset": "log-probabilities shifted against the tokens",
    "noise": "the labelled weights in a lower precision",
    "prompt": "sampled from another prompt",
    "unknown_model": "sampled by none of the candidates",
    "too_short": "too few tokens to decide",
    "not_checked": "not checked",
}
"""Meaning of each kind of verdict."""

UNDECIDED = ("too_short", "not_checked")
"""Kinds of verdicts that neither confirm the label nor find a fault."""
NO_FAULT = ("as_labelled", *UNDECIDED)
"""Kinds of verdicts that are not faults. All other kinds are, even if unknown to this version."""


VERDICT_COLUMNS: tuple[Column, ...] = (
    Column("dataset", pa.string(), "path of the dataset, as specified"),
    *_ROW,
    Column("num_response_tokens", pa.int32(), "number of tokens in the row's `response_ids`"),
    Column("row_digest", pa.int64(), "digest of the stored row"),
    Column("span", pa.int32(), "index of the span in its row, from 0"),
    Column("start", pa.int32(), "position of the span's first token"),
    Column("end", pa.int32(), "position after the span's last token"),
    Column("num_tokens", pa.int32(), "tokens that were compared"),
    Column("kind", pa.string(), "the fault, or `as_labelled`"),
    optional("labelled_version", pa.int32(), "`policy_version` of the row"),
    optional("best_version", pa.int32(), "best-fitting version; for a swap, the version before"),
    optional("best_weights", pa.string(), "path of these weights"),
    optional("second_version", pa.int32(), "version after a swap"),
    optional("swap_position", pa.int32(), "position of the first token after a swap"),
    optional("labelled_temperature", pa.float32(), "`temperature` of the row"),
    optional("best_temperature", pa.float32(), "temperature that fits best"),
    optional("best_top_p", pa.float32(), "top-p that fits best"),
    optional("best_top_k", pa.int32(), "top-k that fits best; 0 is off"),
    optional("best_min_p", pa.float32(), "min-p that fits best; 0 is off"),
    optional("offset", pa.int32(), "tokens by which the log-probabilities are shifted"),
    optional(
        "log_likelihood_ratio", pa.float64(), "evidence for the verdict against the label, nats"
    ),
    optional("margin", pa.float64(), "evidence for the best version against the next-best, nats"),
    optional("next_version", pa.int32(), "next-best version"),
    optional("num_decisive", pa.int32(), "tokens that favour one side by more than 0.5 nats"),
    optional("noise_scale", pa.float64(), "noise of the span relative to the dataset's noise"),
    optional("mean_difference", pa.float64(), "mean absolute difference from the best fit, nats"),
    optional("reason", pa.string(), "explanation of the finding"),
)
"""Columns of a table of verdicts, declared like the columns of the rollout table."""


BLAME = "blame"
"""Directory of these tables in a run: `RUN/blame/*.parquet`."""

UPDATE_SHARE_COLUMNS: tuple[Column, ...] = (
    Column("run", pa.string(), "directory of the run, as specified"),
    Column("global_step", pa.int32(), "number of the update"),
    Column("dataset", pa.string(), "path of the dataset, as configured"),
    *_ROW,
    Column("row_digest", pa.int64(), "digest of the stored row"),
    Column(
        "share",
        pa.float64(),
        "the row's share of the update; the shares of all rows sum to 1, and a row that pulls"
        " against the step has a negative share",
    ),
    per_token(
        "token_shares",
        pa.float32(),
        "each response token's share of the update, null where the token is not a target;"
        " sums to `share`",
    ),
)
"""Columns of such a table, declared like the columns of the rollout table."""
