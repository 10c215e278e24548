"""Rows that do not record how they were sampled: compare with the model, and refuse to guess."""

from __future__ import annotations

import polars as pl

import rollout_io
from pipelines.rescoring.versions import with_version
from pipelines.sampling_defaults import (
    COLUMNS,
    FILE,
    NEUTRAL,
    missing_columns,
    sampling_defaults,
)
from schemas.errors import InputError, count, first_of
from trainer.config.train_config import TrainConfig


def scan_rows(config: TrainConfig) -> pl.LazyFrame:
    """Scan the dataset, with the rewards of the version `config.data.reward`.

    `config.data.sampling_defaults` fills in the settings that rows do not record.
    """
    rows = rollout_io.scan(config.data.dataset)
    if config.data.reward is not None:
        rows = with_version(rows, config.data.dataset, config.data.reward)
    if config.data.sampling_defaults is None:
        return rows
    found = (
        sampling_defaults(config.model.path)
        if config.data.sampling_defaults == "model"
        else NEUTRAL
    )
    return (found or NEUTRAL).fill(rows)


def check_sampling(rows: pl.DataFrame, config: TrainConfig) -> str | None:
    """Check rows to train on that do not record all sampling settings.

    A loss without importance ratios and advantages (`cross_entropy`) may imitate any text.

    Returns:
        A note about rows that count as sampled at temperature 1 without truncation, if any.

    Raises:
        InputError: `sampling_defaults`: the model's `generation_config.json` has other settings.
    """
    missing = rows.filter(missing_columns())
    if config.loss.is_supervised or missing.is_empty():
        return None
    defaults = sampling_defaults(config.model.path)
    unknown = missing.filter((defaults or NEUTRAL).are_unknown())
    if defaults is not None and len(unknown):
        row = unknown.row(0, named=True)
        names = [name for name in COLUMNS if row[name] is None]
        got = (
            f"the row does not record {' or '.join(names)}, and engines sample such requests with"
            f" {config.model.path}/{FILE} ({defaults.text}): the gradient would be that of another"
            " distribution, and raw rollout_logprobs are not from the sampled distribution"
        )
        hint = (
            "pass --set data.sampling_defaults=model if the engine used that file, as vLLM and SGLang do, or"
            " =neutral if it sampled at temperature 1 without truncation (vLLM's --generation-config"
            " vllm)"
        )
        where = first_of(row["name"], len(unknown))
        raise InputError("sampling_defaults", where, got, hint=hint)
    names = [name for name in COLUMNS if missing[name].is_null().any()]
    return (
        f"{count(len(missing), 'row')} of an engine without a recorded {' or '.join(names)}: trained"
        " as sampled at temperature 1 without truncation, unless recorded"
    )
