"""Named invariants of a rollout table, and all error ids with kind, cause and fix.

Invariants are checked in `schemas.type_checks`, `schemas.row_checks`, `schemas.token_checks` and
`schemas.structure_checks`; errors and reports print their names. Readers of logs
(`rollout_io.formats.parsing.tokens`) repeat those of log-probabilities, to reject a log early.

Cause and fix of an invariant are declared with its rule, those of all other ids in `error_ids.toml`.
docs/errors.md is generated from them. A test compares these ids with the ids that the code raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from schemas import errors
from schemas.tables import table_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One named invariant, of severity `error` or `warning`; each can be broken while all others hold."""

    name: str
    severity: str
    meaning: str
    hint: str


def rules_of(table: str) -> dict[str, Rule]:
    """Return the rules of a table of names, severities, meanings and hints."""
    return {
        name: Rule(name=name, severity=severity, meaning=meaning, hint=hint)
        for name, severity, meaning, hint in table_rows(table)
    }


RULES: dict[str, Rule] = rules_of("""
columns_and_types | error | required columns exist, types are as declared, and nulls occur only where allowed
    | cast the column to the declared type (docs/table.md), or drop it if it is optional
unique_trajectory | error | a trajectory occurs once, and its id is `{instance_id}_{repetition_id}`
    | give each attempt at an instance a different repetition_id
contiguous_trajectory | error | all rows of a trajectory are adjacent
    | sort the rows by instance_id, repetition_id, step_index
step_index_sequence | error | step_index counts 0..n-1 over the rows of a trajectory
    | keep or drop complete trajectories (.filter(condition.over('trajectory_id'))), or renumber the rows from 0 in
    the order of their last steps
boundary_alignment | error | is_last_step is true exactly where a trajectory ends
    | set is_last_step on the final row of each trajectory and nowhere else
final_row_is_last | error | the table's last row ends its trajectory
    | add the remaining steps of the last trajectory, or remove that trajectory
nonempty_prompt | error | a row without an error has at least one prompt token
    | check the source of the row, because every model call has a prompt
nonempty_response | error | a row without an error has at least one response token
    | remove the step, or set `error` on its trajectory
lengths_align | error | loss_mask, rollout_logprobs, rewards and the other columns by token have one element per
    response token
    | align them before writing: shifted log-probabilities silently corrupt training
token_range | error | token ids are at least 0, and below the vocabulary size if it is known
    | remove padding (-100), and check that the ids come from the tokenizer of this dataset
mask_trains_something | warning | loss_mask is true for at least one response token
    | set loss_mask to true for the tokens to train on; otherwise training has no effect
response_in_prompt | warning | no prompt contains its response as the last assistant message
    | log the messages before the response is appended to them, not after the call
logprobs_finite | error | rollout_logprobs and trainer_logprobs are finite and above the engines' sentinel -9999
    | ask the engine for the sampled token's log-probability, or drop the column
logprobs_nonpositive | error | rollout_logprobs and trainer_logprobs are at most 0
    | check sign and scale: log-probabilities are in nats and at most 0
versions_of_tokens | error | policy_versions are at least 0, and the oldest one is policy_version
    | set policy_version to the oldest version among the sampled tokens, or drop policy_versions
support_has_token | error | a set of sampling_support that is not empty contains the token, and no id twice
    | record the set that the engine sampled from, at each token, or drop the column
teacher_shape | error | each token has as many teacher_logprobs, finite and at most 0, as teacher_token_ids, no id
    twice
    | write both columns from the same answer of the teacher, or drop both
redacted_untrained | error | loss_mask is false where redacted is true
    | set loss_mask to false at redacted tokens: their ids are not what the model sampled
reward_finite | error | reward and rewards are finite
    | use null for an unknown reward, and `error` for a failed trajectory
reward_matches_rewards | error | rewards sum to reward, as do the rewards of the steps in a merged row
    | call pipelines.place_rewards or place_outcomes, or set the rewards before merging
outcome_on_last_step | warning | if earlier rows of a trajectory have a reward, its last row has one too
    | train with outcome = sum: with outcome = last only the last step's reward counts
segments_in_range | error | segments are inside the response, in order, without overlap
    | correct the ranges, or set `segments` to null in rows that contain a single step
prefix_reference | error | a row's prefix is no longer than the earlier step that it refers to
    | write the dataset again from its source: the file was changed by hand
routing_shape | error | rollout_expert_indices cover 1 or more leading tokens of prompt + response, and are >= 0
    | remove the routing of tokens beyond prompt + response, or drop the column
metrics_keys | error | each metric of a row has a value and a name that occurs once in the row
    | write one {key, value} per metric; leave out a metric without a value
picture_reference | error | each sha256 in pictures is `sha256:` and the digest of a file in DS.blobs
    | copy or move DS.blobs together with DS, or convert the log again
picture_spans | error | each start and length in pictures are 1 or more tokens inside prompt + response, in order,
    without overlap
    | correct the spans, or set start and length to null where they are unknown
""")


def findings_of(table: str) -> dict[str, list[str]]:
    """Return the texts of a table of findings.

    The name of a finding is that of its rule, with a suffix where a rule has several. Then follow
    the columns `got`, `expected` and `message` of a breach, as format strings whose fields are
    values that the check passes; a message may also have the fields `column`, `got` and `expected`.
    """
    usual = "{column} is {got}; expected {expected}"
    return {name: [*texts, usual][:3] for name, *texts in table_rows(table)}


FINDINGS: dict[str, list[str]] = findings_of("""
columns_and_types.repeated_name | {num} columns | one | {got} are named {column!r}
columns_and_types.nul | a NUL character | none | the name {column!r} contains a NUL character
columns_and_types.no_name | a column without a name | a name | a column has no name
columns_and_types.fields | {num} fields named {name!r} | one
    | the column {column} has {got}; field names must be unique, without NUL characters
columns_and_types.unknown | {kind} | a type that Polars can read
    | the column {column} is {got}, for which Polars has no type; cast it (decimals: at most 38 digits), or drop it
columns_and_types.missing | no such column | a required column | the required column {column} is missing
columns_and_types.type | {kind} | {declared} | the column {column} has type {got}; expected {expected}
columns_and_types.null | null | a value | {column} is null
columns_and_types.null_element | a null element | no null | {column} contains a null element
columns_and_types.token_source | {text!r} | engine or retokenized
columns_and_types.text | invalid UTF-8 | UTF-8 | the text in column {column} is not UTF-8
unique_trajectory | step 0 again | each trajectory once | the trajectory id was already used by earlier rows
unique_trajectory.name | {name} | {wanted} | trajectory_id is {got} but instance_id and repetition_id give {expected}
contiguous_trajectory | a trajectory that continues after rows of a different trajectory
    | all rows of a trajectory next to each other | the trajectory continues after rows of a different trajectory
step_index_sequence | {step} | {index}
boundary_alignment.early | true | false | is_last_step is true but the trajectory has more rows
boundary_alignment | false | true | is_last_step is false on the last row of the trajectory
final_row_is_last | false | true | is_last_step is false on the last row of the trajectory
nonempty_prompt | 0 tokens | at least 1 token | {column} is empty
nonempty_response | 0 tokens | at least 1 token | {column} is empty
lengths_align | {num} values | {size} | {column} has {got} but response_ids has {expected}
token_range | {element} | {ids} | {column} contains {got}; expected {expected}
mask_trains_something | all false | some true | loss_mask is false for every token
response_in_prompt | its {num} sampled tokens as the last assistant message
    | a prompt that ends before its response | the last assistant message of the prompt is the response itself
logprobs_finite | {element} | finite values above -9999 | {column} contains {got}; expected {expected}
logprobs_nonpositive | {element} | values <= 0 | {column} contains {got}; expected {expected}
versions_of_tokens | {versions} | {oldest} | {column} are {got}, but policy_version, the oldest, is {expected}
versions_of_tokens.negative | {element} | versions >= 0 | {column} contains {got}; expected {expected}
support_has_token | {position} | lacks the sampled id | at token {got}, {column} {expected}
support_has_token.twice | {position} | has an id twice | at token {got}, {column} {expected}
teacher_shape | ids and log-probabilities that do not belong together
    | one finite log-probability of at most 0 per id, no id twice
    | teacher_token_ids and teacher_logprobs have {got}; expected {expected}
redacted_untrained | token {index} | loss_mask false at redacted tokens
    | {column} is true at {got}, which loss_mask trains on; expected {expected}
reward_finite | {reward} | a finite number or null | reward is {got}; it must be finite or null
reward_finite.token | {element} | finite numbers | {column} contains {got}; expected {expected}
reward_matches_rewards | {sum:g} | {reward} | rewards sum to {got} but reward is {expected}
reward_matches_rewards.steps | {reward:g} | {sum:g}
    | reward is {got} but the rewards of the row's steps sum to {expected}
outcome_on_last_step | reward on earlier rows only | reward on the last row
    | earlier rows of the trajectory have a reward but its last row has none
segments_in_range | the range {start}..{end} of step {step} | ordered, disjoint ranges inside 0..{limit}
    | {column} contains {got}; expected {expected}
prefix_reference | {num} tokens of {parent} | 0..{limit} tokens of an earlier step
    | the prompt begins with {got}; expected {expected}
prefix_reference.whole | step {step} as row {index} of its trajectory
    | all rows of a trajectory in one row group, in order | found {got}; expected {expected}
routing_shape | {num} | 1 to {limit} | {column} covers {got} tokens; it must cover {expected} (prompt + response)
routing_shape.negative | an expert below 0 | >= 0 | {column} contains a negative expert index
metrics_keys | {entry} | each name once, without nulls | {column} contains {got}; expected {expected}
picture_reference | {sha256} | sha256: and 64 hexadecimal digits
    | an entry of {column} has the reference {got}; expected {expected}
picture_reference.file | {fault} | a file in DS.blobs | {got}
picture_spans | start {start}, length {length}
    | 1 or more tokens inside prompt + response, after the picture before
    | an entry of {column} has {got}; expected {expected}
""")


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
