"""Checkpoints: Hugging Face model directories that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from trainer.critic import Critic

COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
)


def save_checkpoint(
    model: PreTrainedModel,
    source: Path,
    out: Path,
    global_step: int,
    critic: Critic | None = None,
) -> Path:
    """Write `out/checkpoints/global_step_N/`: model, generation config, tokenizer.

    A critic goes into the directory's `critic/`, which `critic_model` takes.

    The directory is written under another name, synced, and renamed. The optimizer's state is not
    kept: a run starts from a model directory. One that is there already, of the same update, stays.

    Args:
        model: The model, float32.
        source: Model directory the run started from; its tokenizer files are copied.
        out: Directory of the run.
        global_step: Optimizer updates so far.
        critic: Critic of the run, if it has one.

    Returns:
        The checkpoint's directory; `AutoModelForCausalLM.from_pretrained` loads it.
    """
    final = out / "checkpoints" / f"global_step_{global_step}"
    if final.exists():
        return final
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, partial / file.name)
    if critic is not None:
        critic.save(partial / "critic")
    for file in partial.rglob("*"):
        _sync(file)
    partial.rename(final)
    _sync(final.parent)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
