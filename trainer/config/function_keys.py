"""Bind functions named by a configuration to the values of their keys, and check those values."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from schemas.errors import ConfigError, InputError, RolloutError
from trainer.config.functions import KINDS, Function, Kind, find, known_inputs, nearest_inputs
from trainer.config.loss_config import LossConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundFunction:
    """A configured function and the values of its keys.

    Attributes:
        function: The function.
        keys: Values, by parameter name, of all parameters that are configuration keys.
    """

    function: Function
    keys: dict[str, Any]


def bind(kind: Kind, config: LossConfig) -> BoundFunction:
    """Find the function that a configuration names, and bind it to the configured values.

    Raises:
        RolloutError: See `trainer.config.functions.find`.

    Example:
        >>> from trainer.config.functions import LOSS_REDUCTION
        >>> named = LossConfig(loss_reduction="seq_mean_token_sum_norm", max_seq_len=8)
        >>> bind(LOSS_REDUCTION, named).keys
        {'max_seq_len': 8}
    """
    function = find(kind, getattr(config, kind.key))
    return BoundFunction(function=function, keys=key_values(function, config))


def key_values(function: Function, config: LossConfig) -> dict[str, Any]:
    """Return the values of a function's keys, from fields of the configuration or its `[loss]`."""
    fields = config.__dataclass_fields__
    given = {name: getattr(config, name) for name in function.keys if name in fields}
    if not function.is_own:
        return given
    others = (name for name in config.loss if name in function.keys or function.takes_all_keys)
    return given | {name: config.loss[name] for name in others}


def check_functions(config: LossConfig) -> None:
    """Check the functions that a configuration names, and the keys of its table `[loss]`.

    Raises:
        ConfigError: `config_key`, `config_value`: a key of `[loss]` is not a parameter of any
            function, is also a key of the configuration, or has a value of the wrong type.
        InputError: See `find`.
    """
    names = {kind: getattr(config, kind.key, None) for kind in KINDS}
    named = [(kind, name) for kind, name in names.items() if name is not None]
    # Import user functions only.
    own = [find(kind, name) for kind, name in named if name not in kind.built_in]
    fields = config.__dataclass_fields__
    for key, value in config.loss.items():
        if not is_plain(value):
            expected = "a number, text, true or false, or lists and tables of these"
            raise ConfigError("config_value", f"[loss] {key}", str(value), expected)
        if key in fields:
            hint = "set it outside the table; your function receives its value from there"
            got = f"`{key}` is a key of the configuration, not of a function"
            raise ConfigError("config_key", "[loss]", got, hint=hint)
        if not any(key in function.keys or function.takes_all_keys for function in own):
            raise _unknown_key(key, own, fields)
    for function in own:
        _check_keys(function, config)


def is_plain(value: Any) -> bool:
    """True if writing a value as JSON and reading it back leaves it unchanged."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(value[key]) for key in value)
    return value is None or (isinstance(value, bool | int | float | str) and value == value)


def _unknown_key(key: str, own: Collection[Function], fields: Collection[str]) -> ConfigError:
    if not own:
        near = difflib.get_close_matches(key, {*fields} - {"loss"}, n=1, cutoff=0.5)
        hint = "set policy_loss_type, advantage_estimator or loss_reduction to module:function"
        hint = f"did you mean `{near[0]}`? It belongs outside [loss]" if near else hint
        got = f"`{key}` has no effect, because every configured function is built in"
        return ConfigError("config_key", "[loss]", got, hint=hint)
    known = sorted({name for function in own for name in function.keys} - {*fields})
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    names = " and ".join(function.name for function in own)
    expected = f"a parameter of {names}"
    hint = f"use one of {', '.join(known)}" if known else "remove the key: no function takes it"
    hint = f"did you mean `{near[0]}`?" if near else hint
    return ConfigError("config_key", "[loss]", f"`{key}`", expected, hint)


@contextmanager
def suggesting_loss_keys(
    given: Mapping[str, Any], overrides: Sequence[str], fields: Collection[str], table: str = ""
) -> Iterator[None]:
    """Suggest `loss.KEY` for an unknown key that resembles a parameter of a user function.

    Args:
        given: Values of the configuration file.
        overrides: `key=value` strings.
        fields: Known keys.
        table: Prefix "NAME." of the enclosing table.
    """
    try:
        yield
    except RolloutError as error:
        pairs = (override.partition("=") for override in overrides)
        values = {**given, **{key.strip(): value.strip() for key, _, value in pairs}}
        near = _near_loss_key(values, fields) if error.rule == "config_key" else None
        if near is None:
            raise
        raise error.at(error.where, f"did you mean `{table}loss.{near}`?") from None


def _near_loss_key(values: Mapping[str, Any], fields: Collection[str]) -> str | None:
    known: set[str] = set()
    for kind in KINDS:
        name = values.get(kind.key)
        if isinstance(name, str) and ":" in name:
            with suppress(RolloutError):
                known |= find(kind, name).keys.keys()
    unknown = [key for key in values if key.partition(".")[0] not in fields]
    near = [difflib.get_close_matches(key, known - {*fields}, n=1) for key in unknown]
    return near[0][0] if near and near[0] else None


_PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
}


def _check_keys(function: Function, config: LossConfig) -> None:
    """Check that every parameter has a value, and that values from `[loss]` have the right type."""
    values = key_values(function, config)
    for name, parameter in function.keys.items():
        if name not in values and parameter.default is Parameter.empty:
            got = f"parameter `{name}` is neither an input nor a key of [loss]"
            inputs = known_inputs(function.kind)
            known = f"set `{name}` in [loss], or rename it to one of the {inputs}"
            hint = nearest_inputs(function) or known
            raise InputError(function.kind.key, function.name, got, hint=hint)
        annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
        if name in config.loss and annotation in _PLAIN:
            types, expected = _PLAIN[annotation]
            value = config.loss[name]
            if not isinstance(value, types) or (bool not in types and isinstance(value, bool)):
                where = f"[loss] {name}, a parameter of {function.name}"
                raise ConfigError("config_value", where, repr(value), expected)
