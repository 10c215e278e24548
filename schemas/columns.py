"""Declaration of the columns of the rollout table.

`COLUMNS` is the only place that declares a column's name, Arrow type, nullability, length rule and
meaning. The Arrow schema, the documentation table, the Hypothesis strategies and the checks are
derived from it. One row is one sequence: one step of a trajectory, or several merged steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

LOGPROB_SENTINEL = -9999.0
"""vLLM clamps log-probabilities of -inf to this value before it serialises them as JSON."""


class Length(Enum):
    """Length rule of a list column, the same for every row."""

    FREE = "free"
    RESPONSE = "response"  # one element per token of `response_ids`


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of one column.

    Attributes:
        name: Column name.
        type: Arrow type that the writer casts to; None if it depends on the data (routing: the
            number of layers and top-k depend on the model).
        meaning: One-line description for the documentation.
        nullable: True if the column may contain nulls or be absent from the table.
        length: Length rule of a list column.
    """

    name: str
    type: pa.DataType | None
    meaning: str
    nullable: bool = False
    length: Length = Length.FREE


def optional(name: str, kind: pa.DataType | None, meaning: str) -> Column:
    """Declare a column that may contain nulls or be absent."""
    return Column(name, kind, meaning, nullable=True)


def per_token(name: str, kind: pa.DataType, meaning: str, *, nullable: bool = True) -> Column:
    """Declare a list column with one element of type `kind` per response token."""
    return Column(name, pa.list_(kind), meaning, nullable, Length.RESPONSE)


METRICS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.float64())]))
"""Type of `metrics`. Not a map, because `datasets`, Daft and other readers do not support maps."""

SEGMENT_FIELDS: tuple[pa.Field, ...] = (
    pa.field("start", pa.int32()),
    pa.field("length", pa.int32()),
    pa.field("step_index", pa.int32()),
)
"""Fields of every segment. Per-step values (reward, stop_reason, user columns) follow them."""

PICTURES = "pictures"
PICTURES_TYPE = pa.list_(
    pa.struct([("sha256", pa.string()), ("start", pa.int32()), ("length", pa.int32())])
)
"""Type of `pictures`."""

JOINED = "joined"
"""Field of `segments`: true for a segment that a merge created from one step. All other segments
only mark the sampled ranges of a row; `unmerge` does not split them."""

NUM_ROUTED = "num_routed_tokens"
"""Field of `segments`: number of leading tokens of the step (prompt + response) with routing."""

TASK = "task_instance_id"
ROUTING = "list<fixed list<fixed list<int16>>>"

COLUMNS: tuple[Column, ...] = (
    Column("instance_id", pa.string(), "the task or prompt; identifies the group"),
    Column("repetition_id", pa.int32(), "index of the attempt, from 0"),
    Column("trajectory_id", pa.string(), "`{instance_id}_{repetition_id}`, unique"),
    optional(
        TASK,
        pa.string(),
        "the task, where several groups attempt the same one (`rollouts rl` visits each task once "
        "in every pass); null: the task is `instance_id`",
    ),
    Column(
        "step_index",
        pa.int32(),
        "index of the row in its trajectory, from 0; rows are ordered by their last step",
    ),
    Column(
        "is_last_step",
        pa.bool_(),
        "true only on the trajectory's final row, which contains its last step",
    ),
    Column(
        "prompt_token_ids",
        pa.list_(pa.int32()),
        "the exact ids of the prompt that the engine received",
    ),
    Column(
        "response_ids",
        pa.list_(pa.int32()),
        "the exact ids that the engine sampled; in a merged row, also the tokens between its steps",
    ),
    per_token(
        "loss_mask", pa.bool_(), "true for response tokens that are trained on", nullable=False
    ),
    per_token(
        "redacted",
        pa.bool_(),
        "true for sampled tokens whose ids redaction replaced, which are never trained on; null: "
        "the row was not redacted",
    ),
    per_token(
        "rollout_logprobs",
        pa.float32(),
        "the sampler's log-probabilities, nats; 0.0 at tokens that were not sampled",
    ),
    per_token(
        "sampling_support",
        pa.list_(pa.int32()),
        "the ids that could have been drawn at each token (after top-k, top-p and min-p), over "
        "which `rollout_logprobs` are then normalised; empty at tokens that were not sampled; "
        "null: unknown",
    ),
    per_token(
        "trainer_logprobs",
        pa.float32(),
        "log-probabilities under the trainer's policy, as recorded by the trainer, nats; 0.0 at "
        "tokens without one",
    ),
    per_token(
        "teacher_token_ids",
        pa.list_(pa.int32()),
        "a teacher's most likely ids at each token, in place of it; empty where unknown",
    ),
    per_token(
        "teacher_logprobs",
        pa.list_(pa.float32()),
        "log-probabilities of `teacher_token_ids` under the teacher, nats",
    ),
    optional(
        "reward",
        pa.float64(),
        "the row's scalar reward (for a merged row, the sum); null means unknown, never 0",
    ),
    per_token("rewards", pa.float64(), "one reward per response token; sums to `reward`"),
    optional(
        "segments",
        pa.list_(pa.struct(list(SEGMENT_FIELDS))),
        "the ranges of `response_ids` that were sampled, in order, with the original step "
        "index; in a merged row, each segment with `joined` is one original step and "
        "stores the values of that step; null: the entire response is one step",
    ),
    optional(
        "stop_reason", pa.string(), "why sampling ended, as the engine or harness reported it"
    ),
    optional(
        "policy_version",
        pa.int32(),
        "version of the weights that sampled the row; if there are several, the oldest",
    ),
    per_token(
        "policy_versions",
        pa.int32(),
        "version of the weights that sampled each token, where it may change during a response; "
        "0 at tokens that were not sampled; null: `policy_version` sampled them all",
    ),
    optional("temperature", pa.float32(), "sampling temperature"),
    optional("top_p", pa.float32(), "nucleus truncation; 1 is off"),
    optional("top_k", pa.int32(), "top-k truncation; 0 or less is off"),
    optional(
        "sampling_extra",
        pa.string(),
        "JSON of any other setting that changed the sampled distribution (`min_p`, penalties, "
        "`logit_bias`, a grammar, ...); null: unknown",
    ),
    optional(
        "rollout_expert_indices",
        None,
        "list<fixed list<fixed list<int16, topk>, layers>>: experts chosen for each token of "
        "prompt + response, or for only the first n (n >= 1)",
    ),
    optional(
        "agent",
        pa.string(),
        "which agent made the call, if the harness records it (`main`, `checker`)",
    ),
    Column("token_source", pa.string(), "`engine` (exact ids) or `retokenized` (from text)"),
    optional("error", pa.string(), "why the trajectory failed; null if it did not fail"),
    optional(
        "messages",
        pa.string(),
        "JSON of the messages that were sent, for people to read; for a re-tokenized row, the "
        "entire conversation with the model's answers",
    ),
    optional(
        PICTURES,
        PICTURES_TYPE,
        "the pictures, documents and recordings in `messages`, in order. `sha256`: `sha256:` and "
        "the digest of the file in `DS.blobs` (null: the log has only a URL, or it was redacted). "
        "`start` and `length`: the tokens of prompt + response that stand for the picture (null: "
        "unknown, or there are none; `length` alone is null in datasets of schema version 1)",
    ),
    optional("response_text", pa.string(), "text of the response, for people to read"),
    optional("metrics", METRICS_TYPE, "environment metrics"),
    optional("source", pa.string(), "file and position the row was converted from"),
)

TOKEN_SOURCES = ("engine", "retokenized")

COLUMN_BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}
REQUIRED_COLUMNS: tuple[str, ...] = tuple(c.name for c in COLUMNS if not c.nullable)

PREFIX_FIELDS: tuple[pa.Field, ...] = (
    pa.field("parent_step_index", pa.int32(), nullable=True),
    pa.field("prefix_length", pa.int32(), nullable=False),
    pa.field("prompt_suffix_ids", pa.list_(pa.int32()), nullable=False),
)
"""Physical columns of the `prefix` layout; they replace `prompt_token_ids` on disk."""


DECLARED: dict[str, Column] = COLUMN_BY_NAME | {
    f.name: Column(f.name, f.type, "", nullable=f.nullable) for f in PREFIX_FIELDS
}
"""Columns of both layouts by name."""


def routing_type(num_layers: int, topk: int) -> pa.DataType:
    """Return the Arrow type of `rollout_expert_indices` for a model with `num_layers` layers."""
    return pa.list_(pa.list_(pa.list_(pa.int16(), topk), num_layers))


def arrow_schema(optional: tuple[str, ...] | None = None) -> pa.Schema:
    """Return the Arrow schema of the declared columns.

    Args:
        optional: Nullable columns to include; None includes all of them except routing, whose type
            depends on the model.
    """
    return pa.schema(
        [
            pa.field(c.name, c.type, nullable=c.nullable)
            for c in COLUMNS
            if c.type is not None and (not c.nullable or optional is None or c.name in optional)
        ]
    )


def metrics_dict(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, float] | None:
    """Return the metrics of one row as a dictionary.

    Example:
        >>> metrics_dict([{"key": "turns", "value": 3.0}])
        {'turns': 3.0}
    """
    return None if entries is None else {entry["key"]: entry["value"] for entry in entries}


def documentation_table(columns: Iterable[Column] = COLUMNS) -> str:
    """Format declared columns as a Markdown table (for docs/table.md and docs/training.md)."""
    lines = ["| column | type | null | length | meaning |", "|---|---|---|---|---|"]
    for c in columns:
        kind = ROUTING if c.type is None else _type_name(c.type)
        null, length = ("yes" if c.nullable else "no"), c.length.value.replace("free", "")
        lines.append(f"| {c.name} | {kind} | {null} | {length} | {c.meaning} |")
    return "\n".join(lines) + "\n"


def _type_name(kind: pa.DataType) -> str:
    if kind == METRICS_TYPE:
        return "list<struct<key, value>>"
    if kind == PICTURES_TYPE:
        return "list<struct<sha256, start, length>>"
    if pa.types.is_list(kind):
        inner = kind.value_type
        return "list<struct>" if pa.types.is_struct(inner) else f"list<{_type_name(inner)}>"
    return str(kind)
