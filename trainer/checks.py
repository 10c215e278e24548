"""What is checked before a run begins, and before anything is written: one table.

    CONFIGURATION              settings that contradict each other
    TOKENIZER                  the tokenizers of the models, and the dataset's
    ROWS, TRAINED              rows of the dataset, and those to train on
    LEARNING, TAUGHT           whether anything can be learned from them
    SAMPLING, LOGPROBS         how they were sampled, and whether that can be corrected
    PICTURES                   pictures of rows, and the models that are shown them
    ROUTERS, ROUTING           recorded experts (R3), and the models that use them

A rule has the id of its error, an expression that is true where facts break it, and the parts of its
message. Facts are a table with a column `name`, the place of the error: a row, a model, or the dataset.
`trainer.run.dataset_checks` and `model_checks` collect them, and have `refuse` evaluate the rules. The
named invariants are not among them: `rollout_io.validate` refuses what breaks one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from rollout_io.configuration import out_of_bounds
from schemas.errors import ConfigError, InputError, InvariantError, first_of
from schemas.rules import RULES, fix_of

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


class Conflict(NamedTuple):
    """Settings that contradict each other: an error `config_value`.

    Attributes:
        keys: The settings, joined by " and ".
        breach: True for a section, or a configuration, in which they do.
        expected: What is expected instead; `{c.KEY}` is the value of another setting.
    """

    keys: str
    breach: Callable[[Any], bool]
    expected: str


def _in_order(low: str, high: str) -> Conflict:
    def breach(c: Any) -> bool:
        values = getattr(c, low), getattr(c, high)
        return None not in values and not values[0] < values[1]

    return Conflict(f"{low} and {high}", breach, f"{low} < {high}")


CONFIGURATION: dict[str, tuple[Conflict, ...]] = {
    "batch": (
        Conflict(
            "groups_per_batch and groups_per_mini_batch",
            lambda c: c.groups_per_batch % c.groups_per_mini_batch != 0,
            "groups_per_batch divisible by groups_per_mini_batch",
        ),
    ),
    "advantage": (
        Conflict(
            "reward_weights and estimator",
            lambda c: ("separate_rewards" in c.inputs) != bool(c.reward_weights),
            "rewards with weights for gdpo, and none for other estimators",
        ),
        Conflict(
            "reward_weights",
            lambda c: not all(map(math.isfinite, c.reward_weights.values())),
            "finite weights",
        ),
    ),
    "loss": (
        _in_order("geo_mask_low", "geo_mask_high"),
        _in_order("product_mask_low", "product_mask_high"),
        _in_order("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
        _in_order("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
        _in_order("clip_cov_lb", "clip_cov_ub"),
        Conflict(
            "token_mask_is_threshold_low and token_mask_is_threshold_high",
            lambda c: (
                (c.token_mask_is_threshold_low is None) != (c.token_mask_is_threshold_high is None)
            ),
            "both or neither",
        ),
        Conflict(
            "max_seq_len",
            lambda c: c.reduction == "seq_mean_token_sum_norm" and c.max_seq_len is None,
            "a length, because seq_mean_token_sum_norm requires it",
        ),
        Conflict(
            "policy_loss_type and tis_ratio_type",
            lambda c: c.is_anchored_on_sampler and not c.has_own_loss and c.importance_weights,
            "auto or none for tis_ratio_type, because {c.policy_loss_type} already contains the ratio"
            " to rollout_logprobs",
        ),
        Conflict(
            "tis_ratio_type",
            lambda c: (
                c.is_supervised and not c.has_own_loss and c.tis_ratio_type in ("token", "sequence")
            ),
            "auto or none, because {c.policy_loss_type} has no importance ratios",
        ),
        Conflict(
            "policy_loss_type",
            lambda c: c.is_supervised and c.masks_by_ratio,
            "a loss with importance ratios, because the configured masks require them",
        ),
        Conflict(
            "reference_model",
            lambda c: c.reference_model is not None and not c.needs_reference,
            "none, because kl_loss_coef and kl_reward_coef are 0",
        ),
        Conflict(
            "kl_loss_coef and kl_reward_coef",
            lambda c: c.kl_loss_coef and c.kl_reward_coef,
            "at most one above 0",
        ),
        Conflict(
            "kl_reward_coef",
            lambda c: c.is_supervised and c.kl_reward_coef,
            "0, because {c.policy_loss_type} uses no rewards",
        ),
    ),
    "model": (
        Conflict(
            "lora_target_modules and lora_rank",
            lambda c: (
                c.lora_target_modules is not None and not (c.lora_rank and c.lora_target_modules)
            ),
            "module names and a rank",
        ),
    ),
    "optimizer": (
        Conflict(
            "betas", lambda c: not all(0 <= beta < 1 for beta in c.betas), "two numbers in [0, 1)"
        ),
    ),
    "run": (
        Conflict(
            "seed", lambda c: c.seed >= 2**32, "a number below 2^32, the limit of NumPy's generator"
        ),
    ),
    "": (
        Conflict(
            "model.critic_model and advantage.estimator",
            lambda c: c.model.critic_model is not None and not c.advantage.needs_critic,
            "gae, or a custom estimator that takes `values`",
        ),
        Conflict(
            "loss.kl_reward_coef and advantage.estimator",
            lambda c: c.loss.kl_reward_coef and c.advantage.separate_rewards,
            "kl_loss_coef, because separate rewards have no return to subtract it from",
        ),
        Conflict(
            "loss.policy_loss_type and advantage.estimator",
            lambda c: c.loss.is_supervised and c.advantage.needs_critic,
            "an estimator without a critic, because {c.loss.policy_loss_type} uses no advantages",
        ),
    ),
}
"""Rules of each section, and of values in different sections ("")."""


def check_settings(config: Any, section: str = "") -> None:
    """Check the bounds of a section's values, and the rules of the section or of all sections.

    Raises:
        ConfigError: `config_value`: a value is out of bounds, or values contradict each other.
    """
    for key, finding, expected in out_of_bounds(config) if section else ():
        raise ConfigError("config_value", f"{section}.{key}", finding, expected)
    for rule in CONFIGURATION.get(section, ()):
        if rule.breach(config):
            keys = rule.keys.split(" and ")
            values = (attrgetter(key)(config) for key in keys)
            finding = " and ".join("none" if value is None else str(value) for value in values)
            where = " and ".join(f"{section}.{key}" if section else key for key in keys)
            raise ConfigError("config_value", where, finding, rule.expected.format(c=config))


class Rule(NamedTuple):
    """A rule that facts must follow.

    Attributes:
        id: Rule id of the error.
        breach: True for facts that break the rule.
        finding: What is found there.
        expected: What is expected instead.
        hint: How to fix it; "": as the catalogue of ids has it.
        applies: Whether a configuration has this rule.
    """

    id: str
    breach: pl.Expr
    finding: pl.Expr | str
    expected: pl.Expr | str = ""
    hint: pl.Expr | str = ""
    applies: Callable[[TrainConfig], bool] = lambda _: True


def refuse(facts: pl.DataFrame, rules: Iterable[Rule], config: TrainConfig) -> None:
    """Reject facts that break a rule; the error names the first of them."""
    for rule in rules:
        broken = facts.filter(rule.breach) if rule.applies(config) else facts.clear()
        if len(broken):
            finding, expected, hint = (
                broken.select(part).item(0, 0) if isinstance(part, pl.Expr) else part
                for part in (rule.finding, rule.expected, rule.hint)
            )
            kind = InvariantError if rule.id in RULES else InputError
            place = first_of(broken["name"][0], len(broken))
            raise kind(rule.id, place, finding, expected, hint or fix_of(rule.id))


TOKENIZER = Rule(
    "tokenizer_fingerprint",
    pl.col("fingerprint") != pl.col("of_dataset"),
    pl.format("its tokenizer ({}) differs from the tokenizer of {}", "tokenizer", "model"),
    applies=lambda config: not config.data.allow_other_tokenizer,
)

ROWS = (
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

TRAINED = (
    Rule(
        "token_range",
        pl.col("highest_token") >= pl.col("vocab_size"),
        pl.format("token id {}", "highest_token"),
        pl.format("an id from 0 to {}, the model's vocabulary", pl.col("vocab_size") - 1),
        "train the model whose tokenizer produced these ids",
    ),
    Rule(
        "temperature",
        ~pl.col("temperature").is_between(0, float("inf"), closed="none"),
        pl.format("temperature {}", "temperature"),
        "a finite temperature of at least 0",
    ),
    Rule(
        "teacher_logprobs",
        ~pl.col("has_teacher"),
        "teacher_logprobs or teacher_token_ids is null, and distill needs both",
        applies=lambda config: config.loss.policy_loss_type == "distill",
    ),
)

_OFF = (
    "pass --set loss.tis_ratio_type=none to train without the correction, and choose a"
    " policy_loss_type and masks that need no importance ratios"
)
_ANYWAY = (
    f"{_OFF}, or --set loss.allow_mismatched_logprobs=true to correct anyway; convert"
    " with --logprobs-mode, or pass metadata=rollout_io.read_metadata(DS) when rewriting a dataset, if"
    " logprobs_mode is unknown; or record usable ones: vLLM's --logprobs-mode processed_logprobs, and with truncation the kept tokens"
    " (sampling_support), with a top_k of at most 20"
)


_mismatched = partial(
    Rule,
    "rollout_logprobs",
    hint=_ANYWAY,
    applies=lambda config: not config.loss.allow_mismatched_logprobs,
)
_TRUNCATED = (pl.col("top_p") < 1) | (pl.col("top_k") > 0)
_SETTINGS = ("temperature", "top_p", "top_k")
_HOW = pl.format(
    " (logprobs_mode {}, temperature {}, top_p {}, top_k {}{})",
    pl.col("logprobs_mode").fill_null("unknown"),
    *(pl.col(name).cast(pl.String).fill_null("unset") for name in _SETTINGS),
    (", " + pl.col("sampling_extra").str.slice(0, 80)).fill_null(""),
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
    _mismatched(
        pl.col("token_source") == "retokenized",
        "its rollout_logprobs belong to re-tokenized text, not to the engine's tokens",
    ),
    # Processed ones of truncated sampling need the kept tokens: the policy gives them less than their
    # probability. An unknown mode counts as raw, which matters where the two differ.
    _mismatched(
        (pl.col("logprobs_mode") == "processed") & _PROCESSED,
        "rollout_logprobs cover only the tokens that truncation kept, and sampling_support does not"
        " record them" + _HOW,
    ),
    _mismatched(
        pl.col("logprobs_mode").ne_missing("processed") & _RAW,
        "rollout_logprobs are not from the sampled distribution" + _HOW,
    ),
)


_VARY = (
    "`rollouts stats DS` shows rewards and groups: supply rewards that differ within a group (convert"
    " --rewards), sample more attempts (generate with a larger group_size), or join attempts at the same"
    " task (convert --group-by); if failed trajectories mask the groups that vary, --set"
    " data.failed=trajectory leaves out these trajectories alone; --algorithm reinforce++ and gae need no"
    " groups; --set loss.policy_loss_type=cross_entropy imitates rows, such as those of"
    " `rollouts filter DS --where 'return > 0'`"
)


def _learns_from_returns_alone(config: TrainConfig) -> bool:
    """Whether a row whose advantage is 0 has no gradient."""
    loss = config.loss
    learns_otherwise = loss.needs_reference or loss.entropy_loss_coef > 0 or loss.is_supervised
    return not (learns_otherwise or loss.has_own_loss or config.advantage.by_token)


WITHOUT_LOGPROBS = Rule(
    "rollout_logprobs",
    pl.col("needing").is_not_null(),
    pl.format("no row has rollout_logprobs, which {} needs", "needing"),
    hint="record log-probabilities when sampling, or change this setting",
)

LEARNING = (
    Rule(
        "mask_trains_something",
        pl.col("num_rows") == 0,
        "there are no tokens to train on",
        hint="look for loss masks that are all false, failed trajectories, groups without variance, and"
        " rows sampled at temperature 0",
    ),
    Rule(
        "zero_advantages",
        pl.col("num_with_advantage") == 0,
        pl.format(
            "every advantage is 0, because returns do not vary within any group ({})", "groups"
        ),
        hint=_VARY,
        applies=_learns_from_returns_alone,
    ),
    Rule(
        "mask_trains_something",
        pl.col("num_within_length") == 0,
        pl.col("lost"),
        hint=pl.col("longer"),
        applies=lambda config: config.batch.max_row_tokens is not None,
    ),
)

TAUGHT = Rule(
    "teacher_logprobs",
    pl.col("most_teacher_ids") <= 1,
    "no token has more than one teacher id, and a distribution over one id has no gradient",
    hint="record at least the teacher's two most likely ids at each trained token",
    applies=lambda config: config.loss.policy_loss_type == "distill",
)

_UNSET = [pl.when(pl.col(name).is_null()).then(pl.lit(name)) for name in _SETTINGS]
SAMPLING = Rule(
    "sampling_defaults",
    pl.col("relies_on_defaults"),
    pl.format(
        "the row does not record {}, and engines sample such requests with {} ({}): the gradient would"
        " be that of another distribution, and raw rollout_logprobs are not from the sampled"
        " distribution",
        pl.concat_str(_UNSET, separator=" or ", ignore_nulls=True),
        "file",
        "defaults",
    ),
)

PICTURES = (
    Rule(
        "picture_model",
        pl.col("has_pictures") & ~pl.col("sees"),
        pl.format("it shows a picture, but the {} has no encoder of pictures", "model"),
    ),
    Rule(
        "picture_unknown",
        pl.col("has_unknown"),
        "a picture has no sha256, start or length, so what the model saw is unknown",
    ),
    Rule(
        "picture_tokens",
        pl.col("num_outside") > 0,
        pl.format("{} placeholders of pictures are at no picture", "num_outside"),
        "placeholders only where `pictures` has one",
    ),
    Rule(
        "picture_tokens",
        pl.col("trains_picture"),
        "loss_mask is true at a token of a picture",
        "false: pictures are not sampled",
    ),
)
"""Rules of rows, with the facts of `trainer.batches.pictures.picture_facts` and of a model."""

_NO_ROUTER = "cannot replay recorded experts (rollout_expert_indices) in {}; supported families: {}"
ROUTERS = (
    Rule(
        "replay_routing",
        pl.col("topk").is_null(),
        pl.format(_NO_ROUTER, "family", "families"),
    ),
    Rule(
        "replay_routing",
        (pl.col("num_layers") != pl.col("num_recorded_layers"))
        | (pl.col("topk") != pl.col("recorded_topk")),
        pl.format("{} layers with {} experts per token", "num_recorded_layers", "recorded_topk"),
        pl.format("{} layers with {} experts per token, as in {}", "num_layers", "topk", "model"),
    ),
)
ROUTING = (
    Rule(
        "replay_routing",
        pl.col("highest_expert") >= pl.col("num_experts"),
        pl.format("expert {}", "highest_expert"),
        pl.format("0 to {}, the experts of {}", pl.col("num_experts") - 1, "model"),
    ),
    Rule(
        "replay_routing",
        pl.col("repeats_expert"),
        "the same expert twice",
        pl.format("{} different experts per token", "topk"),
    ),
)
