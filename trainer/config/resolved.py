"""Fill in settings that depend on the dataset or the device."""

from __future__ import annotations

import dataclasses

import rollout_io
from pipelines.merging.segments import joined
from pipelines.rewards import dataset_outcome
from trainer.config.train_config import TrainConfig, default_dtype


def resolved(config: TrainConfig) -> TrainConfig:
    """Resolve `outcome` and `merge_rule` from the dataset, and `dtype` from the device, if None.

    Raises:
        RolloutError: The dataset cannot be read.
    """
    data, batch, model = config.data, config.batch, config.model
    rule = batch.merge_rule
    if batch.sequence_layout == "merge" and rule is None:
        rule = "keep" if _was_merged(data.dataset) else "lineage"
    outcome = dataset_outcome(data.dataset, data.outcome)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, outcome=outcome),
        batch=dataclasses.replace(batch, merge_rule=rule),
        model=dataclasses.replace(model, dtype=model.dtype or default_dtype()),
    )


def _was_merged(dataset: str) -> bool:
    """Return True if the last merge or unmerge in the dataset's history is a merge.

    If the history has neither, return True if any row was merged from several steps.
    """
    history = rollout_io.read_metadata(dataset).made_by
    verbs = [made["verb"] for made in history if made.get("verb") in {"merge", "unmerge"}]
    if verbs:
        return bool(verbs[-1] == "merge")
    rows = rollout_io.scan(dataset)
    return bool(rows.select(joined(rows).any()).collect().item())
