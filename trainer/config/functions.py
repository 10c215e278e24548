"""Functions named by the configuration: built-in ones, or your own as `module:function`.

The names of a function's parameters determine its arguments. A parameter that has the name of an
input of its kind receives that array or tensor; all other parameters are keys of the table `[loss]`
or of the configuration. See `trainer.algorithms.protocols` for the inputs and results of each kind.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from schemas.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """A kind of function that a key of the configuration can name.

    Attributes:
        key: Configuration key.
        inputs: Names of parameters that receive an array or a tensor in user functions.
        needs_one_of: Inputs of which a function must take at least one.
        exactly_one: Whether the function must take exactly one of these inputs.
        module: Module of the built-in functions.
        built_in: Path under `module` and inputs of each built-in function. The inputs are repeated
            here so that the configuration can be checked without importing torch.
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
        kind: Kind of function.
        name: Name in the configuration.
        is_own: Whether this is a user function, `module:function`.
        inputs: Parameters that receive arrays or tensors.
        keys: All other parameters: configuration keys.
        takes_all_keys: Whether the function accepts arbitrary keys (`**keys`).
        call: The function.
    """

    kind: Kind
    name: str
    is_own: bool
    inputs: frozenset[str]
    keys: Mapping[str, Parameter]
    takes_all_keys: bool
    call: Callable[..., Any]

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
        ConfigError: `config_value`: no built-in function has this name; `{kind.key}`: the function
            does not exist, is not callable, or its module cannot be imported.
        InputError: `{kind.key}`: the parameters of the function are invalid.
    """
    is_own = name not in kind.built_in
    if is_own and ":" not in name:
        near = difflib.get_close_matches(name, kind.built_in, n=1, cutoff=0.5)
        expected = f"one of {', '.join(kind.built_in)}, or module:function"
        hint = f"did you mean `{near[0]}`?" if near else None
        raise ConfigError("config_value", kind.key, name, expected, hint)
    from pipelines.generation.environments import resolve

    path = name if is_own else f"{kind.module}.{kind.built_in[name][0]}"
    call = resolve(path, kind.key)
    try:
        parameters = inspect.signature(call).parameters
    except (ValueError, TypeError) as error:
        got = f"its signature cannot be read: {error}"
        raise InputError(kind.key, name, got) from None
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
            raise InputError(kind.key, function.name, got)
    taken = function.inputs & {*kind.needs_one_of}
    if not taken or (kind.exactly_one and len(taken) > 1):
        found = nearest_inputs(function)
        got = f"parameters ({', '.join(parameters)})"
        several = "exactly one" if kind.exactly_one else "at least one"
        number = "" if len(kind.needs_one_of) == 1 else f"{several} of "
        expected = f"parameters that include {number}{', '.join(kind.needs_one_of)}"
        hint = found or f"name a parameter after one of the {known_inputs(kind)}"
        raise InputError(kind.key, function.name, got, expected, hint)
    of_tokens = function.inputs & {"trajectory", "values"}
    if kind is ADVANTAGE_ESTIMATOR and "returns" in function.inputs and of_tokens:
        got = f"returns and {', '.join(sorted(of_tokens))}"
        expected = "rewards instead of returns, because the other inputs have one element per token"
        raise InputError(kind.key, function.name, got, expected)


def nearest_inputs(function: Function) -> str | None:
    """Suggest the input that a parameter without a value was probably meant to be."""
    for name in function.keys:
        if near := difflib.get_close_matches(name, function.kind.inputs, n=1, cutoff=0.7):
            return f"`{name}`: did you mean `{near[0]}`?"
    return None


def known_inputs(kind: Kind) -> str:
    """List the inputs that a kind of function may take, for a hint."""
    return f"inputs of {kind.key}: {', '.join(kind.inputs)}"
