"""Describe the functions that a run uses and the values of their keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainer.config.function_keys import bind, is_plain
from trainer.config.functions import ADVANTAGE_ESTIMATOR, KINDS
from trainer.config.train_config import TrainConfig


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


def uses(config: TrainConfig) -> dict[str, Use]:
    """Return the policy loss, advantage estimator and reduction that a run uses, by key.

    There is no estimator if the loss takes no advantages.
    """
    found = {}
    for kind in KINDS:
        if kind is ADVANTAGE_ESTIMATOR and config.is_supervised:
            continue
        bound = bind(kind, config)
        function = bound.function
        defaults = {n: p.default for n, p in function.keys.items()}
        values = {
            key: value if is_plain(value) else repr(value)
            for key, value in (defaults | bound.keys).items()
        }
        place = function.place or None if function.is_own else None
        found[kind.key] = Use(name=function.name, place=place, keys=values)
    return found
