"""Functions named by the configuration: built-in ones, or your own as `module:function`.

The names of a function's parameters determine its arguments. A parameter that has the name of an
input of its kind receives that array or tensor. All other parameters are keys: each gets its value
from the function's section of the configuration, or from the table `own` of that section.
docs/algorithms.md has the inputs and results of each kind.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any

from rollout_io.configuration import type_in_words
from rollout_io.plugins import resolve
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
        built_in: Inputs of each built-in function. They are repeated here so that the configuration
            can be checked without importing torch.
    """

    section: str
    key: str
    rule_id: str
    inputs: tuple[str, ...]
    needs_one_of: tuple[str, ...]
    exactly_one: bool = False
    module: str
    built_in: Mapping[str, str]

    @property
    def path(self) -> str:
        """The key with its section, `section.key`."""
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
        "regular": _RATIO,
        "dual_clip": _RATIO,
        "gspo": f"{_RATIO} row",
        "cispo": f"{_RATIO} rollout_logprobs",
        "sapo": _RATIO,
        "rollout_is": "logprobs rollout_logprobs advantages",
        "dppo": "logprobs rollout_logprobs advantages",
        "clip_cov": f"{_RATIO} selected",
        "kl_cov": f"{_RATIO} selected",
        "importance_sampling": _RATIO,
        "cross_entropy": "logprobs",
        "distill": "logprobs divergence",
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
        "grpo": "returns group_index",
        "rloo": "returns group_index",
        "maxrl": "returns group_index",
        "gdpo": "separate_rewards group_index",
        "reinforce++": "rewards trajectory",
        "gae": "rewards values trajectory",
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
    module="trainer.algorithms.reductions",
    built_in={
        "token_mean": "num_targets",
        "sequence_mean": "row num_rows",
        "seq_mean_token_sum_norm": "row num_rows",
        "prompt_mean": "group num_groups",
        "trajectory_mean": "trajectory num_trajectories",
        "token_mean_legacy": "micro_batch num_micro_batches",
    },
)
PYTHON_NAMES = {"reinforce++": "reinforce_plus_plus", "gae": "whitened_gae"}
"""Python names of built-in functions that have other names in the configuration."""
KINDS = (POLICY_LOSS, ADVANTAGE_ESTIMATOR, LOSS_REDUCTION)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function that the configuration names, with the values of its keys.

    Attributes:
        kind: Kind of function.
        name: Name in the configuration.
        inputs: Parameters that receive arrays or tensors.
        keys: All other parameters: configuration keys.
        takes_all_keys: Whether the function accepts arbitrary keys (`**keys`).
        function: The Python function.
        values: Values of the keys, from the configuration; empty until the function is bound.
    """

    kind: Kind
    name: str
    inputs: frozenset[str]
    keys: Mapping[str, Parameter]
    takes_all_keys: bool
    function: Callable[..., Any]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether this is a user function, `module:function`."""
        return self.name not in self.kind.built_in

    @property
    def location(self) -> str:
        """File and line of a user function; "" if it is built in or unknown."""
        if not self.is_own:
            return ""
        try:
            line = inspect.getsourcelines(inspect.unwrap(self.function))[1]
            return f"{inspect.getsourcefile(inspect.unwrap(self.function))}:{line}"
        except (OSError, TypeError):
            return ""

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the keys for JSON, from the configuration or by default."""
        values = {name: p.default for name, p in self.keys.items()} | dict(self.values)
        return {key: value if is_plain(value) else repr(value) for key, value in values.items()}

    def __str__(self) -> str:
        location = f" ({self.location})" if self.location else ""
        keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.settings.items())
        return f"{self.name}{location}{': ' if keys else ''}{keys}"

    def refused(
        self, finding: str, expected: str = "", hint: str | None = None, *, part: str = ""
    ) -> InputError:
        """Return the error for the function, or for `part` of its result."""
        where = f"{self.name}, {part}" if part else self.name
        return InputError(self.kind.rule_id, where, finding, expected, hint)


def inputs_of(kind: Kind, name: str) -> frozenset[str]:
    """Return the inputs of a function, without importing built-in ones.

    Raises:
        RolloutError: See `find`.
    """
    if name in kind.built_in:
        return frozenset(kind.built_in[name].split())
    return find(kind, name).inputs


@functools.cache
def find(kind: Kind, name: str) -> Function:
    """Import the function that a key names, and check its parameters.

    Raises:
        ConfigError: `config_value`: no built-in function has this name; `{kind.rule_id}`: the function
            does not exist, is not callable, or its module cannot be imported.
        InputError: `{kind.rule_id}`: the parameters of the function are invalid.
    """
    is_own = name not in kind.built_in
    if is_own and ":" not in name:
        expected = f"one of {', '.join(kind.built_in)}, or module:function"
        raise ConfigError("config_value", kind.path, name, expected, _near(name, kind.built_in))
    path = name if is_own else f"{kind.module}:{PYTHON_NAMES.get(name, name)}"
    call = resolve(path, kind.rule_id)
    try:
        parameters = inspect.signature(call).parameters
    except (ValueError, TypeError) as error:
        finding = f"its signature cannot be read: {error}"
        raise InputError(kind.rule_id, name, finding) from None
    inputs = kind.inputs if is_own else kind.built_in[name].split()
    variadic = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    function = Function(
        kind=kind,
        name=name,
        inputs=frozenset(inputs) & parameters.keys(),
        keys={n: p for n, p in parameters.items() if n not in inputs and p.kind not in variadic},
        takes_all_keys=any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()),
        function=call,
    )
    for parameter in parameters.values():
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            raise function.refused(f"parameter `{parameter}` cannot be passed by name")
    taken = function.inputs & {*kind.needs_one_of}
    if not taken or (kind.exactly_one and len(taken) > 1):
        number = f"{'exactly' if kind.exactly_one else 'at least'} one of "
        number = "" if len(kind.needs_one_of) == 1 else number
        expected = f"parameters that include {number}{', '.join(kind.needs_one_of)}"
        raise function.refused(
            f"parameters ({', '.join(parameters)})", expected, _input_for(function)
        )
    of_tokens = function.inputs & {"trajectory", "values"}
    if kind is ADVANTAGE_ESTIMATOR and "rewards" not in function.inputs and of_tokens:
        finding = f"{', '.join(sorted(taken))} and {', '.join(sorted(of_tokens))}"
        why = "because the other inputs have one element per token"
        raise function.refused(finding, f"rewards instead of {', '.join(taken)}, {why}")
    return function


def _near(name: str, names: Iterable[str], place: str = "", cutoff: float = 0.5) -> str | None:
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean `{place}{near[0]}`?" if near else None


def _input_for(function: Function) -> str:
    """Suggest an input for a parameter without a value."""
    for name in function.keys:
        if near := _near(name, function.kind.inputs, cutoff=0.7):
            return f"`{name}`: {near}"
    inputs = f"inputs of {function.kind.path}: {', '.join(function.kind.inputs)}"
    return f"name a parameter after one of the {inputs}"


def bind(kind: Kind, section: Any) -> Function:
    """Find the function that a section names, and bind it to the section's values.

    Values of a function's keys are those of the section, and of its table `own` for a user function.

    Raises:
        RolloutError: See `find`.

    Example:
        >>> from trainer.config.sections import LossConfig
        >>> bind(
        ...     LOSS_REDUCTION, LossConfig(reduction="seq_mean_token_sum_norm", max_seq_len=8)
        ... ).values
        {'max_seq_len': 8}
    """
    function = find(kind, getattr(section, kind.key))
    fields = section.__dataclass_fields__.keys() - {"own"}
    values = {name: getattr(section, name) for name in function.keys if name in fields}
    if function.is_own:
        table = section.own
        values |= {n: table[n] for n in table if n in function.keys or function.takes_all_keys}
    return replace(function, values=values)


def check_functions(section: Any, *kinds: Kind) -> None:
    """Check the functions that a section names, and its table `own`.

    Raises:
        ConfigError: `config_key`, `config_value`: a key of `own` is not a parameter of any function,
            is also a key of the section, or has a value of the wrong type.
        InputError: See `find`; or a parameter has no value.
    """
    # Import user functions only.
    functions = [
        bind(kind, section) for kind in kinds if getattr(section, kind.key) not in kind.built_in
    ]
    table, fields = kinds[0].section, section.__dataclass_fields__.keys() - {"own"}
    keys = {name: p for function in functions for name, p in function.keys.items()}
    for key, value in section.own.items():
        if not is_plain(value):
            expected = "a number, text, true or false, or lists and tables of these"
            raise ConfigError("config_value", f"{table}.own.{key}", str(value), expected)
        if key in fields:
            hint = f"set {table}.{key}; your function receives its value from there"
            finding = f"`{key}` is a key of [{table}], not of a function"
            raise ConfigError("config_key", f"{table}.own", finding, hint=hint)
        if not functions:
            hint = f"set {' or '.join(kind.path for kind in kinds)} to module:function"
            hint = _near(key, fields, f"{table}.") or hint
            finding = f"`{key}` has no effect, because every configured function is built in"
            raise ConfigError("config_key", f"{table}.own", finding, hint=hint)
        if key not in keys and not any(function.takes_all_keys for function in functions):
            free = sorted(keys.keys() - fields)
            hint = (
                f"use one of {', '.join(free)}" if free else "remove the key: no function takes it"
            )
            expected = f"a parameter of {' and '.join(function.name for function in functions)}"
            hint = _near(key, free) or hint
            raise ConfigError("config_key", f"{table}.own", f"`{key}`", expected, hint)
        annotation = keys[key].annotation if key in keys else None
        plain_type = _PLAIN.get(getattr(annotation, "__name__", annotation) or "")
        fits = type(value) is plain_type or (plain_type is float and type(value) is int)
        if plain_type and not fits:
            owner = next(function.name for function in functions if key in function.keys)
            where = f"{table}.own.{key}, a parameter of {owner}"
            raise ConfigError("config_value", where, repr(value), type_in_words(plain_type))
    for function in functions:
        for name, parameter in function.keys.items():
            if name not in function.values and parameter.default is Parameter.empty:
                finding = f"parameter `{name}` is neither an input nor a key of [{table}.own]"
                raise function.refused(finding, hint=_input_for(function))


_PLAIN: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str)}


def is_plain(value: Any) -> bool:
    """True if writing a value as JSON and reading it back leaves it unchanged."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(value[key]) for key in value)
    return value is None or (isinstance(value, bool | int | float | str) and value == value)


def own_parameters(values: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """List the keys `section.own.KEY` of the user functions that a configuration names.

    Args:
        values: Values of the configuration file.
        overrides: `section.key=value` strings.
    """
    parts = (override.partition("=") for override in overrides)
    overridden = {key.strip(): value.strip() for key, _, value in parts}
    parameters = []
    for kind in KINDS:
        section = values.get(kind.section)
        in_file = section.get(kind.key) if isinstance(section, Mapping) else None
        name = overridden.get(kind.path, in_file)
        if isinstance(name, str) and ":" in name:
            with suppress(RolloutError):
                parameters += [f"{kind.section}.own.{key}" for key in find(kind, name).keys]
    return parameters
