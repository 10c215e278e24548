"""Rules that rows must follow to be trained on, as one table.

A rule has the id of its error, a Polars expression that is true for a row which breaks it, and the
parts of its message. Rows are those of `trainer.batch.index_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import polars as pl

from schemas.errors import InputError, InvariantError, first_of
from schemas.rules import RULES
from trainer.config.train_config import TrainConfig

MOST_SAID = 80
"""Maximum length of a JSON value in a message, in characters."""
VALIDATE = "run `rollouts validate DATASET` to list all such rows"


class Rule(NamedTuple):
    """A rule that rows must follow.

    Attributes:
        id: Rule id of the error.
        breach: True for a row that breaks the rule.
        got: What is found in the row.
        expected: What is expected instead.
        hint: How to fix it.
        applies: Whether a configuration has this rule.
    """

    id: str
    breach: pl.Expr
    got: pl.Expr | str
    expected: pl.Expr | str = ""
    hint: str = VALIDATE
    applies: Callable[[TrainConfig], bool] = lambda _: True


_BEGINS = (pl.col("trajectory_id") != pl.col("trajectory_id").shift()).fill_null(value=True)
STRUCTURE = (
    Rule(
        "contiguous_trajectory",
        _BEGINS & ~pl.col("trajectory_id").is_first_distinct(),
        "the rows of this trajectory are not contiguous",
    ),
    Rule(
        "unique_trajectory",
        ~_BEGINS & (pl.col("instance_id") != pl.col("instance_id").shift()),
        "its instance_id differs from the instance_id of the previous row",
    ),
    Rule(
        "step_index_sequence",
        ~_BEGINS & (pl.col("step_index") <= pl.col("step_index").shift()),
        "its step_index is not greater than in the previous row",
    ),
    Rule(
        "columns_and_types",
        ~pl.col("complete"),
        "prompt_token_ids, response_ids or loss_mask contains null",
    ),
    Rule(
        "lengths_align",
        ~pl.col("aligned"),
        "loss_mask, rollout_logprobs or rewards is not as long as response_ids",
    ),
    # Estimators of tokens add up the rewards of steps.
    Rule(
        "unknown_reward",
        pl.col("trains") & ~pl.col("has_reward"),
        "reward and rewards are null, but the estimator needs the reward of every step",
        hint="use pipelines.place_outcomes to give a trajectory's reward to its last step, and 0 to the"
        " others",
        applies=lambda config: config.advantage.by_token,
    ),
    Rule(
        "reward_finite",
        pl.col("trains") & ~pl.col("finite_reward"),
        "reward or rewards contains NaN or infinity",
        applies=lambda config: config.advantage.by_token,
    ),
)
"""Rules for all rows of the dataset."""

_VOCABULARY = pl.format("an id from 0 to {}, the model's vocabulary", pl.col("vocab_size") - 1)
_OTHER_MODEL = "train the model whose tokenizer produced these ids"
TRAINED = (
    Rule(
        "images_in_row",
        pl.col("has_images"),
        "its messages have images, which training does not show to the model",
        hint="pass --set data.images=text to train on the tokens alone, or filter out these rows",
        applies=lambda config: config.data.images == "refuse",
    ),
    Rule("nonempty_prompt", pl.col("num_prompt_tokens") == 0, "0 prompt tokens", "at least one"),
    Rule(
        "token_range",
        pl.col("lowest_token") < 0,
        pl.format("token id {}", "lowest_token"),
        _VOCABULARY,
        _OTHER_MODEL,
    ),
    Rule(
        "token_range",
        pl.col("highest_token") >= pl.col("vocab_size"),
        pl.format("token id {}", "highest_token"),
        _VOCABULARY,
        _OTHER_MODEL,
    ),
    Rule(
        "temperature",
        ~pl.col("temperature").is_between(0, float("inf"), closed="none"),
        pl.format("temperature {}", "temperature"),
        "a finite temperature of at least 0",
        "filter out these rows",
    ),
    Rule(
        "teacher_logprobs",
        ~pl.col("has_teacher"),
        "teacher_logprobs or teacher_token_ids is null, and distill needs both",
        hint="add a teacher's log-probabilities to all rows, or drop the rows without them",
        applies=lambda config: config.loss.policy_loss_type == "distill",
    ),
)
"""Rules for the rows to train on."""

_OFF = (
    "pass --set loss.tis_ratio_type=none to train without the correction, and choose a"
    " policy_loss_type and masks that need no importance ratios"
)
_RECORD = (
    "convert with --logprobs-mode, or pass metadata=rollout_io.read_metadata(DS) when rewriting a"
    " dataset, if logprobs_mode is unknown"
)
_ANYWAY = (
    f"{_OFF}, or --set loss.allow_mismatched_logprobs=true to correct anyway; {_RECORD}; or record"
    " usable ones: vLLM's --logprobs-mode processed_logprobs, and with truncation the kept tokens"
    " (sampling_support), with a top_k of at most 20"
)
_TRUNCATED = (pl.col("top_p") < 1) | (pl.col("top_k") > 0)
_HOW = pl.format(
    " (logprobs_mode {}, temperature {}, top_p {}, top_k {}{})",
    pl.col("logprobs_mode").fill_null("unknown"),
    *(
        pl.col(name).cast(pl.String).fill_null("unset")
        for name in ("temperature", "top_p", "top_k")
    ),
    (", " + pl.col("sampling_extra").str.slice(0, MOST_SAID)).fill_null(""),
)
_RAW = (_TRUNCATED | (pl.col("temperature") != 1) | pl.col("sampling_extra").is_not_null()) & ~(
    pl.col("has_support") & pl.col("logprobs_mode").ne_missing("raw")
)
_PROCESSED = (
    _TRUNCATED | pl.col("sampling_extra").str.contains('"min_p":', literal=True)
) & ~pl.col("has_support")
LOGPROBS = (
    Rule(
        "rollout_logprobs",
        ~pl.col("has_logprobs"),
        "rollout_logprobs is null here but present in other rows to train on",
        hint=_OFF,
    ),
    Rule(
        "logprobs_finite",
        ~pl.col("logprobs_finite"),
        "rollout_logprobs contains null, NaN or infinity",
    ),
    Rule(
        "logprobs_nonpositive",
        ~pl.col("logprobs_nonpositive"),
        "rollout_logprobs contains a value above 0",
    ),
    Rule(
        "rollout_logprobs",
        pl.col("token_source") == "retokenized",
        "its rollout_logprobs belong to re-tokenized text, not to the engine's tokens",
        hint=_ANYWAY,
        applies=lambda config: not config.loss.allow_mismatched_logprobs,
    ),
    # Processed ones of truncated sampling need the kept tokens: the policy gives them less than their
    # probability. An unknown mode counts as raw, which matters where the two differ.
    Rule(
        "rollout_logprobs",
        (pl.col("logprobs_mode") == "processed") & _PROCESSED,
        "rollout_logprobs cover only the tokens that truncation kept, and sampling_support does not"
        " record them" + _HOW,
        hint=_ANYWAY,
        applies=lambda config: not config.loss.allow_mismatched_logprobs,
    ),
    Rule(
        "rollout_logprobs",
        pl.col("logprobs_mode").ne_missing("processed") & _RAW,
        "rollout_logprobs are not from the sampled distribution" + _HOW,
        hint=_ANYWAY,
        applies=lambda config: not config.loss.allow_mismatched_logprobs,
    ),
)
"""Rules for the rows to train on, if their `rollout_logprobs` are used."""


def refuse(rows: pl.DataFrame, rules: Iterable[Rule], config: TrainConfig) -> None:
    """Reject rows that break a rule; the error names the first of them."""
    for rule in rules:
        broken = rows.filter(rule.breach) if rule.applies(config) else rows.clear()
        if len(broken):
            parts = [
                part if isinstance(part, str) else broken.select(part).item(0, 0)
                for part in (rule.got, rule.expected)
            ]
            kind = InvariantError if rule.id in RULES else InputError
            where = first_of(broken["name"][0], len(broken))
            raise kind(rule.id, where, parts[0], parts[1], rule.hint)
