"""Configurations from keys without their sections, because no key is in two sections."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from rollout_io.configuration import build, checked_values
from trainer.config.train_config import TrainConfig
from trainer.rl.config import RlConfig

SECTIONS: dict[str, Any] = {
    name: kind
    for name, kind in typing.get_type_hints(RlConfig).items()
    if dataclasses.is_dataclass(kind)
}
PLACES: dict[str, tuple[str, str]] = {
    field.name: (name, field.name)
    for name, kind in SECTIONS.items()
    for field in dataclasses.fields(kind)
} | {"model": ("model", "path"), "loss_own": ("loss", "own"), "advantage_own": ("advantage", "own")}


def in_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put keys into their sections; the key of `model.path` is `model`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("generate", "evaluate"):
            found[key] = value
        else:
            section, name = PLACES[key]
            found.setdefault(section, {})[name] = value
    return found


def dotted(key: str) -> str:
    """The key with its section, as `--set` takes it."""
    return ".".join(PLACES[key])


def train_config(**values: Any) -> TrainConfig:
    return _built(TrainConfig, {"dataset": "d", "model": "m", "out": "o"} | values)


def rl_config(**values: Any) -> RlConfig:
    return _built(RlConfig, values)


def _built(kind: Any, values: Mapping[str, Any]) -> Any:
    types = typing.get_type_hints(kind)
    nested = in_sections(values)
    return kind(
        **{k: types[k](**v) if dataclasses.is_dataclass(types[k]) else v for k, v in nested.items()}
    )


def from_saved(kind: Any, values: Mapping[str, Any]) -> Any:
    """A configuration from what `config.json` has."""
    return build(kind, checked_values(kind, values, (), "config.json"))
