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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One named invariant; each can be broken while all others hold."""

    name: str
    meaning: str
    hint: str
    severity: Literal["error", "warning"] = "error"


_DECLARED = {
    "columns_and_types": (
        "required columns exist, types are as declared, and nulls occur only where allowed",
        "cast the column to the declared type (docs/table.md), or drop it if it is optional",
    ),
    "unique_trajectory": (
        "a trajectory occurs once, and its id is `{instance_id}_{repetition_id}`",
        "give each attempt at an instance a different repetition_id",
    ),
    "contiguous_trajectory": (
        "all rows of a trajectory are adjacent",
        "sort the rows by instance_id, repetition_id, step_index",
    ),
    "step_index_sequence": (
        "step_index counts 0..n-1 over the rows of a trajectory",
        "keep or drop complete trajectories (.filter(condition.over('trajectory_id'))), or "
        "renumber the rows from 0 in the order of their last steps",
    ),
    "boundary_alignment": (
        "is_last_step is true exactly where a trajectory ends",
        "set is_last_step on the final row of each trajectory and nowhere else",
    ),
    "final_row_is_last": (
        "the table's last row ends its trajectory",
        "add the remaining steps of the last trajectory, or remove that trajectory",
    ),
    "nonempty_prompt": (
        "a row without an error has at least one prompt token",
        "check the source of the row, because every model call has a prompt",
    ),
    "nonempty_response": (
        "a row without an error has at least one response token",
        "remove the step, or set `error` on its trajectory",
    ),
    "lengths_align": (
        "loss_mask, rollout_logprobs, rewards and the other columns by token have one element per "
        "response token",
        "align them before writing: shifted log-probabilities silently corrupt training",
    ),
    "token_range": (
        "token ids are at least 0, and below the vocabulary size if it is known",
        "remove padding (-100), and check that the ids come from the tokenizer of this dataset",
    ),
    "mask_trains_something": (
        "loss_mask is true for at least one response token",
        "set loss_mask to true for the tokens to train on; otherwise training has no effect",
    ),
    "response_in_prompt": (
        "no prompt contains its response as the last assistant message",
        "log the messages before the response is appended to them, not after the call",
    ),
    "logprobs_finite": (
        "rollout_logprobs and trainer_logprobs are finite and above the engines' sentinel -9999",
        "ask the engine for the sampled token's log-probability, or drop the column",
    ),
    "logprobs_nonpositive": (
        "rollout_logprobs and trainer_logprobs are at most 0",
        "check sign and scale: log-probabilities are in nats and at most 0",
    ),
    "versions_of_tokens": (
        "policy_versions are at least 0, and the oldest one is policy_version",
        "set policy_version to the oldest version among the sampled tokens, or drop policy_versions",
    ),
    "support_has_token": (
        "a set of sampling_support that is not empty contains the token, and no id twice",
        "record the set that the engine sampled from, at each token, or drop the column",
    ),
    "teacher_shape": (
        "each token has as many teacher_logprobs, finite and at most 0, as teacher_token_ids, no "
        "id twice",
        "write both columns from the same answer of the teacher, or drop both",
    ),
    "redacted_untrained": (
        "loss_mask is false where redacted is true",
        "set loss_mask to false at redacted tokens: their ids are not what the model sampled",
    ),
    "reward_finite": (
        "reward and rewards are finite",
        "use null for an unknown reward, and `error` for a failed trajectory",
    ),
    "reward_matches_rewards": (
        "rewards sum to reward, as do the rewards of the steps in a merged row",
        "call pipelines.place_rewards or place_outcomes, or set the rewards before merging",
    ),
    "outcome_on_last_step": (
        "if earlier rows of a trajectory have a reward, its last row has one too",
        "train with outcome = sum: with outcome = last only the last step's reward counts",
    ),
    "segments_in_range": (
        "segments are inside the response, in order, without overlap",
        "correct the ranges, or set `segments` to null in rows that contain a single step",
    ),
    "prefix_reference": (
        "a row's prefix is no longer than the earlier step that it refers to",
        "write the dataset again from its source: the file was changed by hand",
    ),
    "routing_shape": (
        "rollout_expert_indices cover 1 or more leading tokens of prompt + response, and are >= 0",
        "remove the routing of tokens beyond prompt + response, or drop the column",
    ),
    "metrics_keys": (
        "each metric of a row has a value and a name that occurs once in the row",
        "write one {key, value} per metric; leave out a metric without a value",
    ),
    "picture_reference": (
        "each sha256 in pictures is `sha256:` and the digest of a file in DS.blobs",
        "copy or move DS.blobs together with DS, or convert the log again",
    ),
    "picture_spans": (
        "each start and length in pictures are 1 or more tokens inside prompt + response, in order, "
        "without overlap",
        "correct the spans, or set start and length to null where they are unknown",
    ),
}
"""Meaning and hint of each rule, by its name."""
_WARNINGS = {"mask_trains_something", "response_in_prompt", "outcome_on_last_step"}

RULES: dict[str, Rule] = {
    name: Rule(
        name=name,
        meaning=meaning,
        hint=hint,
        severity="warning" if name in _WARNINGS else "error",
    )
    for name, (meaning, hint) in _DECLARED.items()
}


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
        name: ErrorId(
            kinds=(errors.InvariantError,),
            cause=f"The data breaks an invariant: {rule.meaning}.",
            fix=f"{rule.hint[0].upper()}{rule.hint[1:]}.",
        )
        for name, rule in sorted(RULES.items())
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
