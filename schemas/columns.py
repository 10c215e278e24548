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


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Declaration of one column.

    Attributes:
        name: Column name.
        type: Arrow type that the writer casts to; None if it depends on the data (routing: the
            number of layers and top-k depend on the model).
        nullable: True if the column may contain nulls or be absent from the table.
        length: Length rule of a list column.
        meaning: One-line description for the documentation.
    """

    name: str
    type: pa.DataType | None
    nullable: bool = False
    length: Length = Length.FREE
    meaning: str


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

COLUMNS: tuple[Column, ...] = (
    Column(
        name="instance_id", type=pa.string(), meaning="the task or prompt; identifies the group"
    ),
    Column(name="repetition_id", type=pa.int32(), meaning="index of the attempt, from 0"),
    Column(
        name="trajectory_id", type=pa.string(), meaning="`{instance_id}_{repetition_id}`, unique"
    ),
    Column(
        name=TASK,
        type=pa.string(),
        nullable=True,
        meaning=(
            "the task, where several groups attempt the same one (`rollouts rl` visits each task once "
            "in every pass); null: the task is `instance_id`"
        ),
    ),
    Column(
        name="step_index",
        type=pa.int32(),
        meaning="index of the row in its trajectory, from 0; rows are ordered by their last step",
    ),
    Column(
        name="is_last_step",
        type=pa.bool_(),
        meaning="true only on the trajectory's final row, which contains its last step",
    ),
    Column(
        name="prompt_token_ids",
        type=pa.list_(pa.int32()),
        meaning="the exact ids of the prompt that the engine received",
    ),
    Column(
        name="response_ids",
        type=pa.list_(pa.int32()),
        meaning=(
            "the exact ids that the engine sampled; in a merged row, also the tokens between its "
            "steps"
        ),
    ),
    Column(
        name="loss_mask",
        type=pa.list_(pa.bool_()),
        length=Length.RESPONSE,
        meaning="true for response tokens that are trained on",
    ),
    Column(
        name="redacted",
        type=pa.list_(pa.bool_()),
        nullable=True,
        length=Length.RESPONSE,
        meaning=(
            "true for sampled tokens whose ids redaction replaced, which are never trained on; null: "
            "the row was not redacted"
        ),
    ),
    Column(
        name="rollout_logprobs",
        type=pa.list_(pa.float32()),
        nullable=True,
        length=Length.RESPONSE,
        meaning="the sampler's log-probabilities, nats; 0.0 at tokens that were not sampled",
    ),
    Column(
        name="sampling_support",
        type=pa.list_(pa.list_(pa.int32())),
        nullable=True,
        length=Length.RESPONSE,
        meaning=(
            "the ids that could have been drawn at each token (after top-k, top-p and min-p), over "
            "which `rollout_logprobs` are then normalised; empty at tokens that were not sampled; "
            "null: unknown"
        ),
    ),
    Column(
        name="trainer_logprobs",
        type=pa.list_(pa.float32()),
        nullable=True,
        length=Length.RESPONSE,
        meaning=(
            "log-probabilities under the trainer's policy, as recorded by the trainer, nats; 0.0 at "
            "tokens without one"
        ),
    ),
    Column(
        name="teacher_token_ids",
        type=pa.list_(pa.list_(pa.int32())),
        nullable=True,
        length=Length.RESPONSE,
        meaning="a teacher's most likely ids at each token, in place of it; empty where unknown",
    ),
    Column(
        name="teacher_logprobs",
        type=pa.list_(pa.list_(pa.float32())),
        nullable=True,
        length=Length.RESPONSE,
        meaning="log-probabilities of `teacher_token_ids` under the teacher, nats",
    ),
    Column(
        name="reward",
        type=pa.float64(),
        nullable=True,
        meaning="the row's scalar reward (for a merged row, the sum); null means unknown, never 0",
    ),
    Column(
        name="rewards",
        type=pa.list_(pa.float64()),
        nullable=True,
        length=Length.RESPONSE,
        meaning="one reward per response token; sums to `reward`",
    ),
    Column(
        name="segments",
        type=pa.list_(pa.struct(list(SEGMENT_FIELDS))),
        nullable=True,
        meaning=(
            "the ranges of `response_ids` that were sampled, in order, with the original step "
            "index; in a merged row, each segment with `joined` is one original step and "
            "stores the values of that step; null: the entire response is one step"
        ),
    ),
    Column(
        name="stop_reason",
        type=pa.string(),
        nullable=True,
        meaning="why sampling ended, as the engine or harness reported it",
    ),
    Column(
        name="policy_version",
        type=pa.int32(),
        nullable=True,
        meaning="version of the weights that sampled the row; if there are several, the oldest",
    ),
    Column(
        name="policy_versions",
        type=pa.list_(pa.int32()),
        nullable=True,
        length=Length.RESPONSE,
        meaning=(
            "version of the weights that sampled each token, where it may change during a response; "
            "0 at tokens that were not sampled; null: `policy_version` sampled them all"
        ),
    ),
    Column(name="temperature", type=pa.float32(), nullable=True, meaning="sampling temperature"),
    Column(name="top_p", type=pa.float32(), nullable=True, meaning="nucleus truncation; 1 is off"),
    Column(
        name="top_k", type=pa.int32(), nullable=True, meaning="top-k truncation; 0 or less is off"
    ),
    Column(
        name="sampling_extra",
        type=pa.string(),
        nullable=True,
        meaning=(
            "JSON of any other setting that changed the sampled distribution (`min_p`, penalties, "
            "`logit_bias`, a grammar, ...); null: unknown"
        ),
    ),
    Column(
        name="rollout_expert_indices",
        type=None,
        nullable=True,
        meaning=(
            "list<fixed list<fixed list<int16, topk>, layers>>: experts chosen for each token of "
            "prompt + response, or for only the first n (n >= 1)"
        ),
    ),
    Column(
        name="agent",
        type=pa.string(),
        nullable=True,
        meaning="which agent made the call, if the harness records it (`main`, `checker`)",
    ),
    Column(
        name="token_source",
        type=pa.string(),
        meaning="`engine` (exact ids) or `retokenized` (from text)",
    ),
    Column(
        name="error",
        type=pa.string(),
        nullable=True,
        meaning="why the trajectory failed; null if it did not fail",
    ),
    Column(
        name="messages",
        type=pa.string(),
        nullable=True,
        meaning=(
            "JSON of the messages that were sent, for people to read; for a re-tokenized row, the "
            "entire conversation with the model's answers"
        ),
    ),
    Column(
        name=PICTURES,
        type=PICTURES_TYPE,
        nullable=True,
        meaning=(
            "the pictures, documents and recordings in `messages`, in order. `sha256`: `sha256:` and "
            "the digest of the file in `DS.blobs` (null: the log has only a URL, or it was redacted). "
            "`start` and `length`: the tokens of prompt + response that stand for the picture (null: "
            "unknown, or there are none; `length` alone is null in datasets of schema version 1)"
        ),
    ),
    Column(
        name="response_text",
        type=pa.string(),
        nullable=True,
        meaning="text of the response, for people to read",
    ),
    Column(name="metrics", type=METRICS_TYPE, nullable=True, meaning="environment metrics"),
    Column(
        name="source",
        type=pa.string(),
        nullable=True,
        meaning="file and position the row was converted from",
    ),
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
        kind = "list<fixed list<fixed list<int16>>>" if c.type is None else _type_name(c.type)
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
