"""Named invariants of a rollout table, and all error ids with kind, cause and fix.

Invariants are checked in `schemas.row_checks`, `schemas.structure_checks` and
`schemas.token_checks`; errors and reports print their names. Readers of logs
(`rollout_io.formats.parsing.tokens`) repeat those of log-probabilities, to reject a log early.

Cause and fix of an invariant are declared with its rule, those of all other ids in `error_ids.toml`.
docs/errors.md is generated from them. A test compares these ids with the ids that the code raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from schemas import errors

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One named invariant; each can be broken while all others hold."""

    name: str
    meaning: str
    hint: str
    severity: Severity = "error"


_RULES = (
    Rule(
        name="columns_and_types",
        meaning="required columns exist, types are as declared, and nulls occur only where allowed",
        hint="cast the column to the declared type (docs/table.md), or drop it if it is optional",
    ),
    Rule(
        name="unique_trajectory",
        meaning="a trajectory occurs once, and its id is `{instance_id}_{repetition_id}`",
        hint="give each attempt at an instance a different repetition_id",
    ),
    Rule(
        name="contiguous_trajectory",
        meaning="all rows of a trajectory are adjacent",
        hint="sort the rows by instance_id, repetition_id, step_index",
    ),
    Rule(
        name="step_index_sequence",
        meaning="step_index counts 0..n-1 over the rows of a trajectory",
        hint="keep or drop complete trajectories (.filter(condition.over('trajectory_id'))), or "
        "renumber the rows from 0 in the order of their last steps",
    ),
    Rule(
        name="boundary_alignment",
        meaning="is_last_step is true exactly where a trajectory ends",
        hint="set is_last_step on the final row of each trajectory and nowhere else",
    ),
    Rule(
        name="final_row_is_last",
        meaning="the table's last row ends its trajectory",
        hint="add the remaining steps of the last trajectory, or remove that trajectory",
    ),
    Rule(
        name="nonempty_prompt",
        meaning="a row without an error has at least one prompt token",
        hint="check the source of the row, because every model call has a prompt",
    ),
    Rule(
        name="nonempty_response",
        meaning="a row without an error has at least one response token",
        hint="remove the step, or set `error` on its trajectory",
    ),
    Rule(
        name="lengths_align",
        meaning="loss_mask, rollout_logprobs, rewards and the other columns by token have one element per "
        "response token",
        hint="align them before writing: shifted log-probabilities silently corrupt training",
    ),
    Rule(
        name="token_range",
        meaning="token ids are at least 0, and below the vocabulary size if it is known",
        hint="remove padding (-100), and check that the ids come from the tokenizer of this dataset",
    ),
    Rule(
        name="mask_trains_something",
        meaning="loss_mask is true for at least one response token",
        hint="set loss_mask to true for the tokens to train on; otherwise training has no effect",
        severity="warning",
    ),
    Rule(
        name="response_in_prompt",
        meaning="no prompt contains its response as the last assistant message",
        hint="log the messages before the response is appended to them, not after the call",
        severity="warning",
    ),
    Rule(
        name="logprobs_finite",
        meaning="rollout_logprobs and trainer_logprobs are finite and above the engines' sentinel -9999",
        hint="ask the engine for the sampled token's log-probability, or drop the column",
    ),
    Rule(
        name="logprobs_nonpositive",
        meaning="rollout_logprobs and trainer_logprobs are at most 0",
        hint="check sign and scale: log-probabilities are in nats and at most 0",
    ),
    Rule(
        name="versions_of_tokens",
        meaning="policy_versions are at least 0, and the oldest one is policy_version",
        hint="set policy_version to the oldest version among the sampled tokens, or drop policy_versions",
    ),
    Rule(
        name="support_has_token",
        meaning="a set of sampling_support that is not empty contains the token, and no id twice",
        hint="record the set that the engine sampled from, at each token, or drop the column",
    ),
    Rule(
        name="teacher_shape",
        meaning="each token has as many teacher_logprobs, finite and at most 0, as teacher_token_ids, no "
        "id twice",
        hint="write both columns from the same answer of the teacher, or drop both",
    ),
    Rule(
        name="redacted_untrained",
        meaning="loss_mask is false where redacted is true",
        hint="set loss_mask to false at redacted tokens: their ids are not what the model sampled",
    ),
    Rule(
        name="reward_finite",
        meaning="reward and rewards are finite",
        hint="use null for an unknown reward, and `error` for a failed trajectory",
    ),
    Rule(
        name="reward_matches_rewards",
        meaning="rewards sum to reward, as do the rewards of the steps in a merged row",
        hint="call pipelines.place_rewards or place_outcomes, or set the rewards before merging",
    ),
    Rule(
        name="outcome_on_last_step",
        meaning="if earlier rows of a trajectory have a reward, its last row has one too",
        hint="train with outcome = sum: with outcome = last only the last step's reward counts",
        severity="warning",
    ),
    Rule(
        name="segments_in_range",
        meaning="segments are inside the response, in order, without overlap",
        hint="correct the ranges, or set `segments` to null in rows that contain a single step",
    ),
    Rule(
        name="prefix_reference",
        meaning="a row's prefix is no longer than the earlier step that it refers to",
        hint="write the dataset again from its source: the file was changed by hand",
    ),
    Rule(
        name="routing_shape",
        meaning="rollout_expert_indices cover 1 or more leading tokens of prompt + response, and are >= 0",
        hint="remove the routing of tokens beyond prompt + response, or drop the column",
    ),
    Rule(
        name="metrics_keys",
        meaning="each metric of a row has a value and a name that occurs once in the row",
        hint="write one {key, value} per metric; leave out a metric without a value",
    ),
    Rule(
        name="picture_reference",
        meaning="each sha256 in pictures is `sha256:` and the digest of a file in DS.blobs",
        hint="copy or move DS.blobs together with DS, or convert the log again",
    ),
    Rule(
        name="picture_spans",
        meaning="each start and length in pictures are 1 or more tokens inside prompt + response, in order, "
        "without overlap",
        hint="correct the spans, or set start and length to null where they are unknown",
    ),
)

RULES: dict[str, Rule] = {rule.name: rule for rule in _RULES}


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorId:
    """The error classes, cause and fix of an error id.

    Attributes:
        kinds: Error classes that use this id; several if the class depends on where the cause is.
        cause: Cause of the error, as one sentence.
        fix: How to fix the error, as one sentence.
    """

    kinds: tuple[type[errors.RolloutError], ...]
    cause: str
    fix: str


@cache
def error_ids() -> dict[str, ErrorId]:
    """Return all error ids, ordered by kind and name."""
    import tomllib

    ids = {
        rule.name: ErrorId(
            kinds=(errors.InvariantError,),
            cause=f"The data breaks an invariant: {rule.meaning}.",
            fix=f"{rule.hint[0].upper()}{rule.hint[1:]}.",
        )
        for rule in sorted(RULES.values(), key=lambda rule: rule.name)
    }
    text = Path(__file__).with_name("error_ids.toml").read_text(encoding="utf-8")
    for names, entries in tomllib.loads(text).items():
        kinds = tuple(getattr(errors, name) for name in names.split(" or "))
        ids |= {name: ErrorId(kinds=kinds, **entry) for name, entry in entries.items()}
    return ids


def fix_of(name: str) -> str:
    """Return the fix of an error id as a hint.

    Example:
        >>> fix_of("lfs_pointer")
        'run `git lfs pull`'
    """
    fix = error_ids()[name].fix
    return f"{fix[0].lower()}{fix[1:-1]}"
