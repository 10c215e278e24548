"""Formats of supervised and preference data for `rollouts export`, as data.

Kind of samples      one sample is                                       selected by
sft                  a sequence: steps that continue each other          `all`, `best`, `best_passing` or `>=X`
dpo                  two branches of a fork: chosen and rejected steps   `forks` or `best_worst`
kto                  a step, with a label                                `mean` or `>=X`
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rollout_io.formats.exports import AT_LEAST, Format

if TYPE_CHECKING:
    from rollout_io.dataset.storage import PathLike
    from rollout_io.formats.exporting import Exported, Failed

SELECTIONS = {
    "sft": ("all", "best", "best_passing", AT_LEAST),
    "dpo": ("forks", "best_worst"),
    "kto": ("mean", AT_LEAST),
}
KINDS = {
    "sft": ("sft", "trl", "TRL's `messages`, JSONL"),
    "sft_images": ("sft", "images", "TRL's `messages` and `images`, Parquet"),
    "sft_tokens": ("sft", None, "TRL's `input_ids` and `assistant_masks`, Parquet"),
    "sharegpt": ("sft", "sharegpt", "ShareGPT's `conversations`, JSONL"),
    "openai_sft": ("sft", "openai", "OpenAI's fine-tuning data, JSONL"),
    "dpo": ("dpo", "trl", "TRL's `prompt`, `chosen` and `rejected`, JSONL"),
    "dpo_images": ("dpo", "images", "the same with `images` of the prompt, Parquet"),
    "dpo_tokens": ("dpo", None, "the ids of the same pairs, Parquet"),
    "kto": ("kto", "trl", "TRL's `prompt`, `completion` and `label`, JSONL"),
    "kto_images": ("kto", "images", "the same with `images` of the prompt, Parquet"),
    "kto_tokens": ("kto", None, "the ids of the same samples, Parquet"),
}
"""Kind of samples, dialect of their messages (None: token ids), and description, by name."""


def _written(name: str, dataset: PathLike, out: PathLike, failed: Failed, select: str) -> Exported:
    from pipelines.exporting.export import write

    kind, dialect, _ = KINDS[name]
    return write(dataset, out, failed, select, kind=kind, dialect=dialect)


FORMATS = {
    name: Format(summary, partial(_written, name), SELECTIONS[kind], "trajectory")
    for name, (kind, _, summary) in KINDS.items()
}
