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

from schemas.columns import columns_of

TOKENS = "tokens"
"""Directory of the token records in a run."""
PREFIX, SUFFIX = "global_step_", ".parquet"
_ROW = columns_of("""
instance_id | string | required | group of the row
trajectory_id | string | required | trajectory of the row
step_index | int32 | required | index of the row in its trajectory
""")

TOKEN_RECORD_COLUMNS = (
    *columns_of("""
dataset | string | required | path of the dataset, as configured
"""),
    *_ROW,
    *columns_of("""
row_digest | int64 | required | digest of the stored row, to detect a dataset whose row has changed
loss_mask | list<bool> | required per token | true for targets of this update
advantages | list<float> | optional per token | advantage; null if the loss does not use advantages
weights | list<float> | optional per token | weight of the target's loss, from `loss.reduction`
old_logprobs | list<float> | optional per token | log-probability under the policy at the start of the batch, nats;
    null if unused
logprobs | list<float> | optional per token | log-probability under the policy before this step, nats
ref_logprobs | list<float> | optional per token | log-probability under the reference, nats; null without a KL
    divergence
importance_weights | list<float> | optional per token | exp(logprobs - old_logprobs), with the exponent clamped to
    +-20
correction_weights | list<float> | optional per token | factor that corrects for sampler mismatch; 0 where rejected,
    null without correction
entropy | list<float> | optional per token | entropy of the policy's distribution, nats
losses | list<float> | optional per token | loss before `weights`, including correction, KL and entropy terms: the sum
    of weights x losses over all targets is the update's `loss`
clipped | list<bool> | optional per token | true if the policy loss clipped the target
rejected | list<bool> | optional per token | true if the correction masked the target
"""),
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


VERDICT_COLUMNS = (
    *columns_of("""
dataset | string | required | path of the dataset, as specified
"""),
    *_ROW,
    *columns_of("""
num_response_tokens | int32 | required | number of tokens in the row's `response_ids`
row_digest | int64 | required | digest of the stored row
span | int32 | required | index of the span in its row, from 0
start | int32 | required | position of the span's first token
end | int32 | required | position after the span's last token
num_tokens | int32 | required | tokens that were compared
kind | string | required | the fault, or `as_labelled`
labelled_version | int32 | optional | `policy_version` of the row
best_version | int32 | optional | best-fitting version; for a swap, the version before
best_weights | string | optional | path of these weights
second_version | int32 | optional | version after a swap
swap_position | int32 | optional | position of the first token after a swap
labelled_temperature | float | optional | `temperature` of the row
best_temperature | float | optional | temperature that fits best
best_top_p | float | optional | top-p that fits best
best_top_k | int32 | optional | top-k that fits best; 0 is off
best_min_p | float | optional | min-p that fits best; 0 is off
offset | int32 | optional | tokens by which the log-probabilities are shifted
log_likelihood_ratio | double | optional | evidence for the verdict against the label, nats
margin | double | optional | evidence for the best version against the next-best, nats
next_version | int32 | optional | next-best version
num_decisive | int32 | optional | tokens that favour one side by more than 0.5 nats
noise_scale | double | optional | noise of the span relative to the dataset's noise
mean_difference | double | optional | mean absolute difference from the best fit, nats
reason | string | optional | explanation of the finding
"""),
)
"""Columns of a table of verdicts, declared like the columns of the rollout table."""


BLAME = "blame"
"""Directory of these tables in a run: `RUN/blame/*.parquet`."""

UPDATE_SHARE_COLUMNS = (
    *columns_of("""
run | string | required | directory of the run, as specified
global_step | int32 | required | number of the update
dataset | string | required | path of the dataset, as configured
"""),
    *_ROW,
    *columns_of("""
row_digest | int64 | required | digest of the stored row
share | double | required | the row's share of the update; the shares of all rows sum to 1, and a row that pulls
    against the step has a negative share
token_shares | list<float> | optional per token | each response token's share of the update, null where the token is
    not a target; sums to `share`
"""),
)
"""Columns of such a table, declared like the columns of the rollout table."""
