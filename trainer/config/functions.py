"""Functions named by the configuration: built-in ones, or your own as `module:function`.

The names of a function's parameters determine its arguments. A parameter that has the name of an
input of its kind receives that array or tensor. All other parameters are keys: each gets its value
from the function's section of the configuration, or from the table `own` of that section. See
`trainer.algorithms.protocols` for the inputs and results of each kind.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any

from rollout_io.configuration import type_in_words
from schemas.errors import ConfigError, InputError, RolloutError


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """A kind of function that a key of the configuration can name.

    Attributes:
        section: Section of the configuration with the function's keys.
        key: Key of the section.
        rule_id: Id of errors about the function.
        inputs: Names of parameters that receive an array or a tensor in user functions.
        needs_one_of: Inputs of which a function must take at least one.
        exactly_one: Whether the function must take exactly one of these inputs.
        module: Module of the built-in functions.
        built_in: Path under `module` and inputs of each built-in function. The inputs are repeated
            here so that the configuration can be checked without importing torch.
    """

    section: str
    key: str
    rule_id: str
    inputs: tuple[str, ...]
    needs_one_of: tuple[str, ...]
    exactly_one: bool = False
    module: str
    built_in: Mapping[str, tuple[str, str]]

    @property
    def place(self) -> str:
        """The key with its section."""
        return f"{self.section}.{self.key}"


_RATIO = "logprobs old_logprobs advantages"
POLICY_LOSS = Kind(
    section="loss",
    key="policy_loss_type",
    rule_id="policy_loss_type",
    inputs=("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "row"),
    needs_one_of=("logprobs",),
    module="trainer.algorithms.losses",
    built_in={
        "regular": ("policy:regular", _RATIO),
        "dual_clip": ("policy:dual_clip", _RATIO),
        "gspo": ("policy:gspo", f"{_RATIO} row"),
        "cispo": ("policy:cispo", f"{_RATIO} rollout_logprobs"),
        "sapo": ("policy:sapo", _RATIO),
        "rollout_is": ("policy:rollout_is", "logprobs rollout_logprobs advantages"),
        "dppo": ("policy:dppo", "logprobs rollout_logprobs advantages"),
        "clip_cov": ("covariance:clip_cov", f"{_RATIO} selected"),
        "kl_cov": ("covariance:kl_cov", f"{_RATIO} selected"),
        "importance_sampling": ("policy:importance_sampling", _RATIO),
        "cross_entropy": ("policy:cross_entropy", "logprobs"),
        "distill": ("policy:distill", "logprobs divergence"),
    },
)
ADVANTAGE_ESTIMATOR = Kind(
    section="advantage",
    key="estimator",
    rule_id="advantage_estimator",
    inputs=("returns", "separate_rewards", "rewards", "group_index", "trajectory", "values"),
    needs_one_of=("returns", "separate_rewards", "rewards"),
    exactly_one=True,
    module="trainer.algorithms.advantages",
    built_in={
        "grpo": ("outcome:grpo", "returns group_index"),
        "rloo": ("outcome:rloo", "returns group_index"),
        "maxrl": ("outcome:maxrl", "returns group_index"),
        "gdpo": ("outcome:gdpo", "separate_rewards group_index"),
        "reinforce++": ("token:reinforce_plus_plus", "rewards trajectory"),
        "gae": ("token:whitened_gae", "rewards values trajectory"),
    },
)
LOSS_REDUCTION = Kind(
    section="loss",
    key="reduction",
    rule_id="loss_reduction",
    inputs=(
        *("num_targets", "row", "num_rows", "trajectory", "num_trajectories"),
        *("group", "num_groups", "micro_batch", "num_micro_batches"),
    ),
    needs_one_of=("num_targets", "row", "trajectory", "group", "micro_batch"),
    module="trainer.algorithms.losses",
    built_in={
        "token_mean": ("reductions:token_mean", "num_targets"),
        "sequence_mean": ("reductions:sequence_mean", "row num_rows"),
        "seq_mean_token_sum_norm": ("reductions:seq_mean_token_sum_norm", "row num_rows"),
        "prompt_mean": ("reductions:prompt_mean", "group num_groups"),
        "trajectory_mean": ("reductions:trajectory_mean", "trajectory num_trajectories"),
        "token_mean_legacy": ("reductions:token_mean_legacy", "micro_batch num_micro_batches"),
    },
)
KINDS = (POLICY_LOSS, ADVANTAGE_ESTIMATOR, LOSS_REDUCTION)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function named by the configuration.

    Attributes:
        kind: Kind of function.
        name: Name in the configuration.
        is_own: Whether this is a user function, `module:function`.
        inputs: Parameters that receive arrays or tensors.
        keys: All other parameters: configuration keys.
        takes_all_keys: Whether the function accepts arbitrary keys (`**keys`).
        call: The function.
        values: Values of the keys, from the configuration; empty until the function is bound.
    """

    kind: Kind
    name: str
    is_own: bool
    inputs: frozenset[str]
    keys: Mapping[str, Parameter]
    takes_all_keys: bool
    call: Callable[..., Any]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """File and line of the definition; "" if unknown."""
        try:
            line = inspect.getsourcelines(inspect.unwrap(self.call))[1]
            return f"{inspect.getsourcefile(inspect.unwrap(self.call))}:{line}"
        except (OSError, TypeError):
            return ""


def inputs_of(kind: Kind, name: str) -> frozenset[str]:
    """Return the inputs of a function, without importing built-in ones.

    Raises:
        RolloutError: See `find`.
    """
    if name in kind.built_in:
        return frozenset(kind.built_in[name][1].split())
    return find(kind, name).inputs


@functools.cache
def find(kind: Kind, name: str) -> Function:
    """Import the function that a key names.

    Raises:
        ConfigError: `config_value`: no built-in function has this name; `{kind.rule_id}`: the function
            does not exist, is not callable, or its module cannot be imported.
        InputError: `{kind.rule_id}`: the parameters of the function are invalid.
    """
    is_own = name not in kind.built_in
    if is_own and ":" not in name:
        near = difflib.get_close_matches(name, kind.built_in, n=1, cutoff=0.5)
        expected = f"one of {', '.join(kind.built_in)}, or module:function"
        hint = f"did you mean `{near[0]}`?" if near else None
        raise ConfigError("config_value", kind.place, name, expected, hint)
    from pipelines.generation.environments import resolve

    path = name if is_own else f"{kind.module}.{kind.built_in[name][0]}"
    call = resolve(path, kind.rule_id)
    try:
        parameters = inspect.signature(call).parameters
    except (ValueError, TypeError) as error:
        got = f"its signature cannot be read: {error}"
        raise InputError(kind.rule_id, name, got) from None
    inputs = kind.inputs if is_own else kind.built_in[name][1].split()
    function = Function(
        kind=kind,
        name=name,
        is_own=is_own,
        inputs=frozenset(inputs) & parameters.keys(),
        keys={n: p for n, p in parameters.items() if n not in inputs and p.kind not in _VARIADIC},
        takes_all_keys=any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()),
        call=call,
    )
    _check_parameters(function, parameters)
    return function


_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _check_parameters(function: Function, parameters: Mapping[str, Parameter]) -> None:
    kind = function.kind
    for parameter in parameters.values():
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            got = f"parameter `{parameter}` cannot be passed by name"
            raise InputError(kind.rule_id, function.name, got)
    taken = function.inputs & {*kind.needs_one_of}
    if not taken or (kind.exactly_one and len(taken) > 1):
        found = nearest_inputs(function)
        got = f"parameters ({', '.join(parameters)})"
        several = "exactly one" if kind.exactly_one else "at least one"
        number = "" if len(kind.needs_one_of) == 1 else f"{several} of "
        expected = f"parameters that include {number}{', '.join(kind.needs_one_of)}"
        hint = found or f"name a parameter after one of the {known_inputs(kind)}"
        raise InputError(kind.rule_id, function.name, got, expected, hint)
    of_tokens = function.inputs & {"trajectory", "values"}
    if kind is ADVANTAGE_ESTIMATOR and "rewards" not in function.inputs and of_tokens:
        got = f"{', '.join(sorted(taken))} and {', '.join(sorted(of_tokens))}"
        expected = f"rewards instead of {', '.join(taken)}, because the other inputs have one element per token"
        raise InputError(kind.rule_id, function.name, got, expected)


def nearest_inputs(function: Function) -> str | None:
    """Suggest the input that a parameter without a value was probably meant to be."""
    for name in function.keys:
        if near := difflib.get_close_matches(name, function.kind.inputs, n=1, cutoff=0.7):
            return f"`{name}`: did you mean `{near[0]}`?"
    return None


def known_inputs(kind: Kind) -> str:
    """List the inputs that a kind of function may take, for a hint."""
    return f"inputs of {kind.place}: {', '.join(kind.inputs)}"


def bind(kind: Kind, section: Any) -> Function:
    """Find the function that a section names, and bind it to the section's values.

    Raises:
        RolloutError: See `find`.

    Example:
        >>> from trainer.config.loss_config import LossConfig
        >>> bind(
        ...     LOSS_REDUCTION, LossConfig(reduction="seq_mean_token_sum_norm", max_seq_len=8)
        ... ).values
        {'max_seq_len': 8}
    """
    function = find(kind, getattr(section, kind.key))
    return replace(function, values=_values(function, section))


def _values(function: Function, section: Any) -> dict[str, Any]:
    """Return the values of a function's keys, from its section or the section's table `own`."""
    fields = section.__dataclass_fields__.keys() - {"own"}
    values = {name: getattr(section, name) for name in function.keys if name in fields}
    if function.is_own:
        own = section.own
        values |= {n: own[n] for n in own if n in function.keys or function.takes_all_keys}
    return values


def check_functions(section: Any, *kinds: Kind) -> None:
    """Check the functions that a section names, and its table `own`.

    Raises:
        ConfigError: `config_key`, `config_value`: a key of `own` is not a parameter of any function,
            is also a key of the section, or has a value of the wrong type.
        InputError: See `find`.
    """
    names = [(kind, getattr(section, kind.key)) for kind in kinds]
    # Import user functions only.
    own = [find(kind, name) for kind, name in names if name not in kind.built_in]
    table, fields = kinds[0].section, section.__dataclass_fields__.keys() - {"own"}
    for key, value in section.own.items():
        if not is_plain(value):
            expected = "a number, text, true or false, or lists and tables of these"
            raise ConfigError("config_value", f"{table}.own.{key}", str(value), expected)
        if key in fields:
            hint = f"set {table}.{key}; your function receives its value from there"
            got = f"`{key}` is a key of [{table}], not of a function"
            raise ConfigError("config_key", f"{table}.own", got, hint=hint)
        if not any(key in function.keys or function.takes_all_keys for function in own):
            raise _unknown_key(key, own, kinds, fields)
    for function in own:
        _check_values(function, section)


def is_plain(value: Any) -> bool:
    """True if writing a value as JSON and reading it back leaves it unchanged."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(value[key]) for key in value)
    return value is None or (isinstance(value, bool | int | float | str) and value == value)


def _unknown_key(
    key: str, own: Sequence[Function], kinds: Sequence[Kind], fields: set[str]
) -> ConfigError:
    table = kinds[0].section
    if not own:
        near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
        hint = f"set {' or '.join(kind.place for kind in kinds)} to module:function"
        hint = f"did you mean `{table}.{near[0]}`?" if near else hint
        got = f"`{key}` has no effect, because every configured function is built in"
        return ConfigError("config_key", f"{table}.own", got, hint=hint)
    known = sorted({name for function in own for name in function.keys} - fields)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    expected = f"a parameter of {' and '.join(function.name for function in own)}"
    hint = f"use one of {', '.join(known)}" if known else "remove the key: no function takes it"
    hint = f"did you mean `{near[0]}`?" if near else hint
    return ConfigError("config_key", f"{table}.own", f"`{key}`", expected, hint)


_PLAIN: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str)}


def _check_values(function: Function, section: Any) -> None:
    """Check that every parameter has a value, and that values from `own` have the right type."""
    values, table = _values(function, section), f"{function.kind.section}.own"
    for name, parameter in function.keys.items():
        if name not in values and parameter.default is Parameter.empty:
            got = f"parameter `{name}` is neither an input nor a key of [{table}]"
            known = f"set {table}.{name}, or rename it to one of the {known_inputs(function.kind)}"
            hint = nearest_inputs(function) or known
            raise InputError(function.kind.rule_id, function.name, got, hint=hint)
        annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
        if name in section.own and annotation in _PLAIN:
            kind, value = _PLAIN[annotation], section.own[name]
            if type(value) is not kind and not (kind is float and type(value) is int):
                where = f"{table}.{name}, a parameter of {function.name}"
                raise ConfigError("config_value", where, repr(value), type_in_words(kind))


def own_parameters(values: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """List the keys `section.own.KEY` of the user functions that a configuration names.

    Args:
        values: Values of the configuration file.
        overrides: `section.key=value` strings.
    """
    given = {key.strip(): value.strip() for key, _, value in (o.partition("=") for o in overrides)}
    found = []
    for kind in KINDS:
        section = values.get(kind.section)
        in_file = section.get(kind.key) if isinstance(section, Mapping) else None
        name = given.get(kind.place, in_file)
        if isinstance(name, str) and ":" in name:
            with suppress(RolloutError):
                found += [f"{kind.section}.own.{key}" for key in find(kind, name).keys]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A function that a run uses, with the values of its keys.

    Attributes:
        name: Name in the configuration.
        place: FILE:LINE of a user function; None if it is built in or unknown.
        keys: Values of its keys.
    """

    name: str
    place: str | None
    keys: dict[str, Any]

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.keys.items())
        return f"{self.name}{place}{': ' if keys else ''}{keys}"


def used(kind: Kind, section: Any) -> Use:
    """Describe the function that a section names."""
    function = bind(kind, section)
    values = {name: p.default for name, p in function.keys.items()} | dict(function.values)
    return Use(
        name=function.name,
        place=function.place or None if function.is_own else None,
        keys={key: value if is_plain(value) else repr(value) for key, value in values.items()},
    )
