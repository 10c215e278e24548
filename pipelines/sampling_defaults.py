"""Sampling settings of rows that record none: those in the model's `generation_config.json`.

An engine such as vLLM or SGLang applies these settings to every request that leaves them out, so a
missing setting is not the neutral one. `sampling_extra_of` looks further settings up in what made a dataset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rollout_io.formats.parsing.bodies import sampling_extra
from schemas.errors import ConfigError

FILE = "generation_config.json"
COLUMNS: dict[str, pl.DataType] = {
    "temperature": pl.Float32(),
    "top_p": pl.Float32(),
    "top_k": pl.Int32(),
}
"""Columns of the rollout table that every row of an engine should have, with their types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Settings that an engine uses where a request leaves them out; by default neutral.

    Attributes:
        temperature: Divisor of the logits.
        top_p: Nucleus truncation; 1 is off.
        top_k: Top-k truncation; 0 is off.
        extra: Other settings, as in the column `sampling_extra`; None if there are none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    extra: str | None = None

    @property
    def text(self) -> str:
        """The settings that are not neutral.

        Example:
            >>> SamplingDefaults(temperature=0.6, top_k=20, extra='{"min_p":0.1}').text
            'temperature 0.6, top_k 20, {"min_p":0.1}'
        """
        changed = [
            f"{name} {value:g}"
            for name in COLUMNS
            if (value := getattr(self, name)) != getattr(NEUTRAL, name)
        ]
        return ", ".join([*changed, *([self.extra] if self.extra else [])])

    @property
    def fields(self) -> dict[str, Any]:
        """All settings as fields of a request, named as in vLLM's API."""
        fields = {name: getattr(self, name) for name in COLUMNS}
        fields |= {"min_p": 0.0, "repetition_penalty": 1.0}
        fields |= json.loads(self.extra or "{}")
        return fields

    def are_unknown(self) -> pl.Expr:
        """Build the condition that a row does not record a setting that is not neutral here.

        False for rows of re-tokenized text, which another model may have sampled.
        """
        changed = [n for n in COLUMNS if getattr(self, n) != getattr(NEUTRAL, n)]
        names = list(COLUMNS) if self.extra else changed
        missing = pl.any_horizontal(pl.lit(value=False), *(pl.col(n).is_null() for n in names))
        return missing & _FROM_ENGINE

    def fill(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        """Fill in the settings that rows of an engine do not record.

        Args:
            rows: A rollout table; columns may be absent.
        """
        present = rows.collect_schema()
        kinds = COLUMNS | {"sampling_extra": pl.String(), "token_source": pl.String()}
        absent = [pl.lit(None, kind).alias(n) for n, kind in kinds.items() if n not in present]
        missing = pl.any_horizontal(pl.col(name).is_null() for name in COLUMNS)
        given = [
            pl.when(_FROM_ENGINE)
            .then(pl.col(name).fill_null(pl.lit(getattr(self, name), kind)))
            .otherwise(name)
            .alias(name)
            for name, kind in COLUMNS.items()
        ]
        extra = pl.when(missing & _FROM_ENGINE & pl.col("sampling_extra").is_null())
        given.append(extra.then(pl.lit(self.extra, pl.String)).otherwise("sampling_extra"))
        filled = rows.with_columns(absent).with_columns(given[:-1], sampling_extra=given[-1])
        return filled if "token_source" in present else filled.drop("token_source")


NEUTRAL = SamplingDefaults()
_FROM_ENGINE = (pl.col("token_source") != "retokenized").fill_null(value=True)


def missing_columns() -> pl.Expr:
    """Build the condition that a row of an engine does not record all settings."""
    return pl.any_horizontal(pl.col(name).is_null() for name in COLUMNS) & _FROM_ENGINE


def sampling_defaults(model: str | Path) -> SamplingDefaults | None:
    """Read the sampling settings in a model directory; None if it has none that can be read.

    Like vLLM, this ignores `do_sample`.
    """
    try:
        found = json.loads((Path(model) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    temperature, top_p = _number(found.get("temperature"), 1.0), _number(found.get("top_p"), 1.0)
    top_k = int(_number(found.get("top_k"), 0))
    others = {name: found.get(name) for name in ("min_p", "repetition_penalty")}
    return SamplingDefaults(
        temperature=temperature,
        top_p=min(top_p, 1.0) if top_p > 0 else 1.0,
        top_k=top_k if 0 < top_k < 2**31 else 0,
        extra=sampling_extra({k: v for k, v in others.items() if v is not None}),
    )


def request_defaults(named: str | None) -> dict[str, Any]:
    """Return the fields to add to requests that leave them out; none if `named` is None.

    Args:
        named: A model directory with a `generation_config.json`, or `neutral`.

    Raises:
        ConfigError: `config_value`: the directory has no such file.
    """
    if named is None:
        return {}
    found = NEUTRAL if named == "neutral" else sampling_defaults(named)
    if found is None:
        expected = f"a model directory with a {FILE}, or neutral"
        raise ConfigError("config_value", "sampling_defaults", named, expected)
    return found.fields


def _number(value: Any, usual: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and value >= 0 else usual


def sampling_extra_of(history: Iterable[Mapping[str, Any]]) -> str | None:
    """Return `sampling_extra` of a dataset that was generated before this column existed."""
    for config in (step.get("config") for step in history):
        if not isinstance(config, dict):
            continue
        fields, min_p = config.get("sampling_extra"), config.get("min_p")
        extra = fields if isinstance(fields, dict) else {}
        if (extra or min_p) and (text := sampling_extra({**extra, "min_p": min_p})):
            return text
    return None
