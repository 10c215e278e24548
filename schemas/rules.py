"""Named invariants of a rollout table; errors and reports print these ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        meaning="required columns are present, types are as declared, nulls only where allowed",
        hint="cast the column to the declared type (docs/table.md), or drop it if it is optional",
    ),
    Rule(
        name="unique_trajectory",
        meaning="a trajectory occurs once, and its id is `{instance_id}_{repetition_id}`",
        hint="give each attempt at an instance its own repetition_id",
    ),
    Rule(
        name="contiguous_trajectory",
        meaning="all rows of a trajectory are adjacent",
        hint="sort the rows by instance_id, repetition_id, step_index",
    ),
    Rule(
        name="step_index_sequence",
        meaning="step_index counts 0..n-1 over the rows of a trajectory",
        hint=(
            "keep or drop trajectories whole: .filter(condition.over('trajectory_id')); or re-number "
            "the rows from 0 in the order of their last steps"
        ),
    ),
    Rule(
        name="boundary_alignment",
        meaning="is_last_step is true exactly where a trajectory ends",
        hint="set is_last_step on the final row of each trajectory and nowhere else",
    ),
    Rule(
        name="final_row_is_last",
        meaning="the table's last row ends its trajectory",
        hint="the last trajectory is cut off: add its remaining steps, or leave it out",
    ),
    Rule(
        name="nonempty_prompt",
        meaning="a row without an error has at least one prompt token",
        hint="a call cannot have had an empty prompt: look at the source of the row",
    ),
    Rule(
        name="nonempty_response",
        meaning="a row without an error has at least one response token",
        hint="leave the step out, or set `error` on its trajectory",
    ),
    Rule(
        name="lengths_align",
        meaning="loss_mask, rollout_logprobs and rewards have one element per response token",
        hint="off-by-one log-probabilities mistrain silently: align them before writing",
    ),
    Rule(
        name="token_range",
        meaning="token ids are non-negative and below the vocabulary size, where that is known",
        hint="these ids are of another tokenizer, or padding (-100) was left in",
    ),
    Rule(
        name="mask_trains_something",
        meaning="at least one response token of the table trains",
        hint="every loss_mask is false: training on this table changes nothing",
        severity="warning",
    ),
    Rule(
        name="response_in_prompt",
        meaning="a trained response is not the last assistant message of its own prompt",
        hint="the log recorded its messages after the call: end each prompt before its response",
        severity="warning",
    ),
    Rule(
        name="logprobs_finite",
        meaning="rollout_logprobs are finite and above the engines' sentinel -9999",
        hint="ask the engine for the sampled token's log-probability, or drop the column",
    ),
    Rule(
        name="logprobs_nonpositive",
        meaning="rollout_logprobs are at most 0",
        hint="these are not log-probabilities in nats: check sign and scale",
    ),
    Rule(
        name="reward_finite",
        meaning="reward and rewards are finite",
        hint="use null for an unknown reward, and `error` for a failed trajectory",
    ),
    Rule(
        name="reward_matches_rewards",
        meaning="rewards sum to reward; so do the rewards of the steps in a merged row",
        hint="place rewards (pipelines.place_rewards, place_outcomes), or set them before merging",
    ),
    Rule(
        name="outcome_on_last_step",
        meaning="where inner rows carry reward, the last row carries some too",
        hint="with outcome = last only the last step's reward counts; train with outcome = sum",
        severity="warning",
    ),
    Rule(
        name="segments_in_range",
        meaning="segments are inside the response, in order, without overlap",
        hint="leave `segments` null for a row that is one step's",
    ),
    Rule(
        name="prefix_reference",
        meaning="a row's prefix is no longer than the earlier step that it refers to",
        hint="the file was edited by hand: write it again from its source",
    ),
    Rule(
        name="routing_shape",
        meaning="rollout_expert_indices cover 1 to p+r leading tokens, with experts >= 0",
        hint="keep the routes of a leading part of prompt + response only",
    ),
)

RULES: dict[str, Rule] = {rule.name: rule for rule in _RULES}
