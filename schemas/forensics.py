"""The tables of verdicts and of shares, which `rollouts audit` and `rollouts blame` write.

Verdicts: one row for each sampled span. An audit compares the stored log-probabilities of a span
with log-probabilities under candidate weights and settings. Positions are indices into the row's
`response_ids`.

Shares: one row for each row of an update, with its share of the update. The table may have further
numeric columns, which the viewer also shows.

`dataset`, `trajectory_id` and `step_index` identify the row of the dataset (for merged rows, the
step as `unmerge` numbers it); `row_digest` shows whether it has changed since.
"""

from __future__ import annotations

import pyarrow as pa

from schemas.columns import Column, Length

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


def _optional(name: str, kind: pa.DataType, meaning: str) -> Column:
    return Column(name=name, type=kind, nullable=True, meaning=meaning)


VERDICT_COLUMNS: tuple[Column, ...] = (
    Column(name="dataset", type=pa.string(), meaning="path of the dataset, as specified"),
    Column(name="instance_id", type=pa.string(), meaning="group of the row"),
    Column(name="trajectory_id", type=pa.string(), meaning="trajectory of the row"),
    Column(name="step_index", type=pa.int32(), meaning="index of the row in its trajectory"),
    Column(
        name="num_response_tokens",
        type=pa.int32(),
        meaning="number of tokens in the row's `response_ids`",
    ),
    Column(name="row_digest", type=pa.int64(), meaning="digest of the stored row"),
    Column(name="span", type=pa.int32(), meaning="index of the span in its row, from 0"),
    Column(name="start", type=pa.int32(), meaning="position of the span's first token"),
    Column(name="end", type=pa.int32(), meaning="position after the span's last token"),
    Column(name="num_tokens", type=pa.int32(), meaning="tokens that were compared"),
    Column(name="kind", type=pa.string(), meaning="the fault, or `as_labelled`"),
    _optional("labelled_version", pa.int32(), "`policy_version` of the row"),
    _optional("best_version", pa.int32(), "best-fitting version; for a swap, the version before"),
    _optional("best_weights", pa.string(), "path of these weights"),
    _optional("second_version", pa.int32(), "version after a swap"),
    _optional("swap_position", pa.int32(), "position of the first token after a swap"),
    _optional("labelled_temperature", pa.float32(), "`temperature` of the row"),
    _optional("best_temperature", pa.float32(), "temperature that fits best"),
    _optional("best_top_p", pa.float32(), "top-p that fits best"),
    _optional("best_top_k", pa.int32(), "top-k that fits best; 0 is off"),
    _optional("best_min_p", pa.float32(), "min-p that fits best; 0 is off"),
    _optional("offset", pa.int32(), "tokens by which the log-probabilities are shifted"),
    _optional(
        "log_likelihood_ratio", pa.float64(), "evidence for the verdict against the label, nats"
    ),
    _optional("margin", pa.float64(), "evidence for the best version against the next-best, nats"),
    _optional("next_version", pa.int32(), "next-best version"),
    _optional("num_decisive", pa.int32(), "tokens that favour one side by more than 0.5 nats"),
    _optional("noise_scale", pa.float64(), "noise of the span relative to the dataset's noise"),
    _optional("mean_difference", pa.float64(), "mean absolute difference from the best fit, nats"),
    _optional("reason", pa.string(), "explanation of the finding"),
)
"""Columns of a table of verdicts, declared like the columns of the rollout table."""


BLAME = "blame"
"""Directory of these tables in a run: `RUN/blame/*.parquet`."""

UPDATE_SHARE_COLUMNS: tuple[Column, ...] = (
    Column(name="run", type=pa.string(), meaning="directory of the run, as specified"),
    Column(name="global_step", type=pa.int32(), meaning="number of the update"),
    Column(name="dataset", type=pa.string(), meaning="path of the dataset, as configured"),
    Column(name="instance_id", type=pa.string(), meaning="group of the row"),
    Column(name="trajectory_id", type=pa.string(), meaning="trajectory of the row"),
    Column(name="step_index", type=pa.int32(), meaning="index of the row in its trajectory"),
    Column(name="row_digest", type=pa.int64(), meaning="digest of the stored row"),
    Column(
        name="share",
        type=pa.float64(),
        meaning="the row's share of the update; the shares of all rows sum to 1, and a row that pulls"
        " against the step has a negative share",
    ),
    Column(
        name="token_shares",
        type=pa.list_(pa.float32()),
        nullable=True,
        length=Length.RESPONSE,
        meaning="each response token's share of the update, null where the token is not a target;"
        " sums to `share`",
    ),
)
"""Columns of such a table, declared like the columns of the rollout table."""
