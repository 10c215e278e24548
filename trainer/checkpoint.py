"""Checkpoints: Hugging Face model directories that are there whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from rollout_io.files import replace_text, sync
from schemas.errors import RolloutError
from trainer.critic import Critic
from trainer.lora import save_model

COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
)
PREFIX, LATEST = "global_step_", "latest"


def save_checkpoint(
    model: PreTrainedModel,
    source: Path,
    out: Path,
    global_step: int,
    critic: Critic | None = None,
    *,
    save_state: Callable[[Path], None] | None = None,
    keep: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
    critic_weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write `out/checkpoints/global_step_N/`: model, generation config, tokenizer, state.

    Adapters are merged into the model, and go into `adapter/` as they are, as peft has them. A
    critic goes into the directory's `critic/`, which `critic_model` takes.

    The directory is written under another name, synced, and renamed; then `checkpoints/latest`
    names it; then those that are not kept are renamed and removed. One that is there already, of
    the same update, stays.

    Args:
        model: The model, float32.
        source: Model directory the run started from; its tokenizer files are copied.
        out: Directory of the run.
        global_step: Optimizer updates so far.
        critic: Critic of the run, if it has one.
        save_state: Writes the directory's `state/`, which is what a run goes on from.
        keep: Newest checkpoints that stay; None: all.
        weights: The model's, by name; None: those it has.
        critic_weights: Likewise the critic's.

    Returns:
        The checkpoint's directory; `AutoModelForCausalLM.from_pretrained` loads it.
    """
    final = checkpoint_path(out, global_step)
    if not final.exists():
        with whole_or_not(final) as partial:
            write_model(partial, model, source, weights)
            if critic is not None:
                critic.save(partial / "critic", critic_weights)
            if save_state is not None:
                save_state(partial / "state")
    replace_text(final.parent / LATEST, f"{final.name}\n")
    for path in _checkpoints(out)[: -keep if keep else 0]:
        remove_directory(path)
    return final


@contextmanager
def whole_or_not(final: Path) -> Iterator[Path]:
    """A directory to be filled, which is synced and given its name at the end; or removed."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        for file in (*partial.rglob("*"), partial):
            sync(file)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(final)
    sync(final.parent)


def checkpoint_path(out: Path, global_step: int) -> Path:
    """Where the checkpoint of an update is, or will be."""
    return out / "checkpoints" / f"{PREFIX}{global_step}"


def latest_checkpoint(out: Path) -> Path | None:
    """The checkpoint that `out/checkpoints/latest` names; without that file, the newest, if any.

    Raises:
        RolloutError: It is not there, or has no state to go on from.
    """
    pointer, found = out / "checkpoints" / LATEST, _checkpoints(out)
    if pointer.exists():
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
        found = [path for path in found if path.name == name]
        if not found:
            expected = "the name of a checkpoint beside it"
            raise RolloutError("checkpoint_latest", str(pointer), repr(name), expected)
    if found and not (found[-1] / "state").is_dir():
        hint = "start another run with --model this checkpoint"
        raise RolloutError("checkpoint_state", str(found[-1]), "no state/", "one", hint)
    return found[-1] if found else None


def discard_after(out: Path, global_step: int) -> None:
    """Remove the checkpoints of later updates, and what killed runs left half written."""
    for path in (out / "checkpoints").glob(f".{PREFIX}*"):
        shutil.rmtree(path)
    for path in _checkpoints(out):
        if _step(path) > global_step:
            remove_directory(path)


def write_model(
    path: Path, model: PreTrainedModel, source: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model directory with the tokenizer files of `source`; see `save_checkpoint`."""
    path.mkdir(parents=True)
    save_model(model, path, weights or model.state_dict())
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, path / file.name)


def _checkpoints(out: Path) -> list[Path]:
    """Oldest first."""
    paths = (out / "checkpoints").glob(f"{PREFIX}*")
    return sorted((path for path in paths if path.name[len(PREFIX) :].isdecimal()), key=_step)


def _step(path: Path) -> int:
    return int(path.name[len(PREFIX) :])


def remove_directory(path: Path) -> None:
    """Under another name: a checkpoint is never half removed."""
    removed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed)
