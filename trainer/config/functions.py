"""Functions that the configuration names: built-in ones, or your own as `module:function`.

The names of a function's parameters determine its arguments. A parameter named like an input of its
kind gets that array or tensor; every other one is a key of the table `[loss]`, or of the
configuration. See `trainer.algorithms.protocols` for the inputs and results of each kind.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from schemas.errors import RolloutError

if TYPE_CHECKING:
    from trainer.config.loss_config import LossConfig
    from trainer.config.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """Functions that a key of the configuration can name.

    Attributes:
        key: The key.
        inputs: Names of the parameters that get an array or a tensor, for user functions.
        needs_one_of: A function takes exactly one of these, or at least one.
        exactly_one: Which of the two.
        module: Where the built-in functions are.
        built_in: Path under `module` of each built-in function and its inputs. They are repeated
            here because the configuration is checked without importing torch.
    """

    key: str
    inputs: tuple[str, ...]
    needs_one_of: tuple[str, ...]
    exactly_one: bool = False
    module: str
    built_in: Mapping[str, tuple[str, str]]


_RATIO = "logprobs old_logprobs advantages"
POLICY_LOSS = Kind(
    key="policy_loss_type",
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
    },
)
ADVANTAGE_ESTIMATOR = Kind(
    key="advantage_estimator",
    inputs=("returns", "rewards", "group_index", "trajectory", "values"),
    needs_one_of=("returns", "rewards"),
    exactly_one=True,
    module="trainer.algorithms.advantages",
    built_in={
        "grpo": ("outcome:grpo", "returns group_index"),
        "rloo": ("outcome:rloo", "returns group_index"),
        "maxrl": ("outcome:maxrl", "returns group_index"),
        "reinforce++": ("token:reinforce_plus_plus", "rewards trajectory"),
        "gae": ("token:whitened_gae", "rewards values trajectory"),
    },
)
LOSS_REDUCTION = Kind(
    key="loss_reduction",
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
        kind: Which key names it.
        name: Its name in the configuration.
        is_own: Whether it is a user function, `module:function`.
        inputs: Its parameters that get arrays or tensors.
        keys: Its other parameters.
        takes_all_keys: Whether it has a parameter `**keys`.
        call: The function.
    """

    kind: Kind
    name: str
    is_own: bool
    inputs: frozenset[str]
    keys: Mapping[str, Parameter]
    takes_all_keys: bool
    call: Callable[..., Any]

    def key_values(self, config: LossConfig) -> dict[str, Any]:
        """Return the values of its keys, from the configuration or from `[loss]`.

        Example:
            >>> from trainer.config.loss_config import LossConfig
            >>> function = find(LOSS_REDUCTION, "seq_mean_token_sum_norm")
            >>> function.key_values(LossConfig(max_seq_len=8))
            {'max_seq_len': 8}
        """
        fields = config.__dataclass_fields__
        given = {name: getattr(config, name) for name in self.keys if name in fields}
        if not self.is_own:
            return given
        others = (name for name in config.loss if name in self.keys or self.takes_all_keys)
        return given | {name: config.loss[name] for name in others}

    @property
    def place(self) -> str:
        """File and line where it is defined, "" if they are unknown."""
        try:
            line = inspect.getsourcelines(inspect.unwrap(self.call))[1]
            return f"{inspect.getsourcefile(inspect.unwrap(self.call))}:{line}"
        except (OSError, TypeError):
            return ""


def inputs_of(kind: Kind, name: str) -> frozenset[str]:
    """Return the inputs of a function, without importing built-in ones.

    Raises:
        RolloutError: As `find`.
    """
    if name in kind.built_in:
        return frozenset(kind.built_in[name][1].split())
    return find(kind, name).inputs


@functools.cache
def find(kind: Kind, name: str) -> Function:
    """Import the function that a key names.

    Raises:
        RolloutError: `kind.key` if the function does not exist, its module cannot be imported, or its
            parameters are invalid.
    """
    is_own = name not in kind.built_in
    if is_own and ":" not in name:
        near = difflib.get_close_matches(name, kind.built_in, n=1, cutoff=0.5)
        expected = f"one of {', '.join(kind.built_in)}, or module:function"
        hint = f"did you mean `{near[0]}`?" if near else None
        raise RolloutError("config_value", kind.key, name, expected, hint)
    from pipelines.generation.environments import resolve

    path = name if is_own else f"{kind.module}.{kind.built_in[name][0]}"
    call = resolve(path, kind.key)
    try:
        parameters = inspect.signature(call).parameters
    except (ValueError, TypeError) as error:
        raise RolloutError(kind.key, name, str(error), "a function with a signature") from None
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
            got = f"a parameter `{parameter}` without a name to call it by"
            raise RolloutError(kind.key, function.name, got, "parameters that are given by name")
    taken = function.inputs & {*kind.needs_one_of}
    if not taken or (kind.exactly_one and len(taken) > 1):
        found = _nearest_inputs(function)
        got = f"parameters ({', '.join(parameters)})"
        several = "exactly one" if kind.exactly_one else "at least one"
        number = "" if len(kind.needs_one_of) == 1 else f"{several} of "
        expected = f"{number}{', '.join(kind.needs_one_of)} among them"
        raise RolloutError(kind.key, function.name, got, expected, found or _known_inputs(kind))
    of_tokens = function.inputs & {"trajectory", "values"}
    if kind is ADVANTAGE_ESTIMATOR and "returns" in function.inputs and of_tokens:
        got = f"returns and {', '.join(sorted(of_tokens))}"
        expected = "rewards in place of returns: the others have an element per token"
        raise RolloutError(kind.key, function.name, got, expected)


def check_functions(config: LossConfig) -> None:
    """Check the functions that a configuration names, and the keys of its table `[loss]`.

    Raises:
        RolloutError: config_key, config_value if a key of `[loss]` belongs to no function, or to the
            configuration, or its value has the wrong type; and as `find`.
    """
    own = [function for function in functions_of(config) if function.is_own]
    fields = config.__dataclass_fields__
    for key, value in config.loss.items():
        if not _is_plain(value):
            expected = "a number, text, true or false, or lists and tables of these"
            raise RolloutError("config_value", f"[loss] {key}", str(value), expected)
        if key in fields:
            hint = "write it outside the table: your function gets it from there"
            expected = "keys that the configuration does not have itself"
            raise RolloutError("config_key", "[loss]", f"`{key}`", expected, hint)
        if not any(key in function.keys or function.takes_all_keys for function in own):
            raise _unknown_key(key, own, fields)
    for function in own:
        _check_keys(function, config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A function as a run uses it.

    Attributes:
        name: As the configuration names it.
        place: FILE:LINE of a function of the user's; None: built-in, or unknown.
        keys: The values of its keys.
    """

    name: str
    place: str | None
    keys: dict[str, Any]

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.keys.items())
        return f"{self.name}{place}{': ' if keys else ''}{keys}"


def uses(config: TrainConfig) -> dict[str, Use]:
    """The loss, the estimator (unless the loss takes no advantages) and the reduction, by key."""
    found = {}
    for kind in KINDS:
        if kind is ADVANTAGE_ESTIMATOR and config.is_supervised:
            continue
        function = find(kind, getattr(config, kind.key))
        defaults = {n: p.default for n, p in function.keys.items()}
        values = {
            key: value if _is_plain(value) else repr(value)
            for key, value in (defaults | function.key_values(config)).items()
        }
        place = function.place or None if function.is_own else None
        found[kind.key] = Use(name=function.name, place=place, keys=values)
    return found


def _is_plain(value: Any) -> bool:
    """True if a value survives JSON unchanged."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(value[key]) for key in value)
    return value is None or (isinstance(value, bool | int | float | str) and value == value)


def functions_of(config: LossConfig) -> Iterator[Function]:
    """The user's functions that a configuration names; built-in ones are not imported."""
    for kind in KINDS:
        name = getattr(config, kind.key, None)
        if name is not None and name not in kind.built_in:
            yield find(kind, name)


def _unknown_key(key: str, own: Collection[Function], fields: Collection[str]) -> RolloutError:
    if not own:
        near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
        expected = "keys of a function of your own, and policy_loss_type, advantage_estimator or"
        expected += " loss_reduction to name one"
        hint = f"did you mean `{near[0]}`, outside the table?" if near else None
        return RolloutError("config_key", "[loss]", f"`{key}`", expected, hint)
    known = sorted({name for function in own for name in function.keys} - {*fields})
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    names = " and ".join(function.name for function in own)
    expected = f"a parameter of {names}"
    hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known) or 'none'}"
    return RolloutError("config_key", "[loss]", f"`{key}`", expected, hint)


_PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
}


def _check_keys(function: Function, config: LossConfig) -> None:
    """Check that every parameter has a value, of the parameter's type if from `[loss]`."""
    values = function.key_values(config)
    for name, parameter in function.keys.items():
        if name not in values and parameter.default is Parameter.empty:
            got, expected = f"a parameter `{name}`", f"an input, or a key `{name}` in [loss]"
            hint = _nearest_inputs(function) or _known_inputs(function.kind)
            raise RolloutError(function.kind.key, function.name, got, expected, hint)
        annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
        if name in config.loss and annotation in _PLAIN:
            types, expected = _PLAIN[annotation]
            value = config.loss[name]
            if not isinstance(value, types) or (bool not in types and isinstance(value, bool)):
                where = f"[loss] {name}, of {function.name}"
                raise RolloutError("config_value", where, repr(value), expected)


def _nearest_inputs(function: Function) -> str | None:
    """Suggest near matches for parameters without a value."""
    for name in function.keys:
        if near := difflib.get_close_matches(name, function.kind.inputs, n=1, cutoff=0.7):
            return f"`{name}`: did you mean `{near[0]}`?"
    return None


def _known_inputs(kind: Kind) -> str:
    return f"inputs of {kind.key}: {', '.join(kind.inputs)}"
