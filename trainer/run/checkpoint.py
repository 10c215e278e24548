"""Checkpoints: Hugging Face model directories, written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from rollout_io.dataset.filesystems import replace_text, whole
from schemas.errors import InputError, count
from trainer.distributed.processes import is_main
from trainer.models.critic import Critic
from trainer.models.lora import save_model
from trainer.models.policy import save_weights

WEIGHTS = frozenset(
    {
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".npz", ".npy"),
        *(
            ".gguf",
            ".ggml",
            ".onnx",
            ".onnx_data",
            ".tflite",
            ".nemo",
            ".distcp",
            ".pkl",
            ".mlmodel",
        ),
    }
)
"""Suffixes of files with weights or optimizer state, which a checkpoint has of its own."""
OWN = ("state", "critic", "adapter", "adapter_config.json")
"""Parts of a checkpoint that belong to the run that wrote it."""
PREFIX, LATEST = "global_step_", "latest"
FILES = "state/files.json"
"""SHA-256 of all other files of a checkpoint with a state, by their relative path."""


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
    """Write `out/checkpoints/global_step_N/`: model, files of its tokenizer and processor, state.

    Adapters are merged into the model, and also written to `adapter/` in peft's format. A critic is
    written to `critic/`, which `critic_model` accepts.

    The directory is written under a temporary name, synced, and renamed; then `checkpoints/latest`
    is updated; then old checkpoints are renamed and deleted. An existing checkpoint of the same
    update is kept.

    Args:
        model: The model, float32.
        source: Model directory the run started from; its `other_files` are copied.
        out: Directory of the run.
        global_step: Number of optimizer updates so far.
        critic: Critic of the run, or None.
        save_state: Writes the directory's `state/`, from which a run resumes.
        keep: Number of checkpoints to keep, newest first; None: all.
        weights: Weights of the model by name; None: the weights in memory.
        critic_weights: Weights of the critic by name; None: the weights in memory.

    Returns:
        Directory of the checkpoint, for `AutoModelForCausalLM.from_pretrained`.
    """
    final = checkpoint_path(out, global_step)
    if not final.exists():
        with whole(final) as partial:
            write_model(partial, model, source, weights)
            if critic is not None:
                critic.save(partial / "critic", critic_weights)
            if save_state is not None:
                save_state(partial / "state")
                digests = json.dumps(_digests(partial), indent=1)
                (partial / FILES).write_text(digests + "\n", encoding="utf-8")
    # Only now does `--resume` find it: a run that is killed before goes on from the checkpoint before.
    replace_text(final.parent / LATEST, f"{final.name}\n")
    for path in list(checkpoints(out).values())[: -keep if keep else 0]:
        remove_directory(path)
    return final


def checkpoint_path(out: Path, global_step: int) -> Path:
    """Return the path of an update's checkpoint."""
    return out / "checkpoints" / f"{PREFIX}{global_step}"


def latest_checkpoint(out: Path) -> Path | None:
    """Return the checkpoint that `checkpoints/latest` names; without that file, the newest, if any.

    Raises:
        InputError: The checkpoint does not exist, or has no state to resume from.
    """
    pointer, saved = out / "checkpoints" / LATEST, list(checkpoints(out).values())
    if pointer.exists():
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
        saved = [path for path in saved if path.name == name]
        if not saved:
            finding = f"the file points to {name!r}, which is not a checkpoint in this directory"
            hint = "write a checkpoint's name into the file, or remove it to use the newest one"
            raise InputError("checkpoint_latest", str(pointer), finding, hint=hint)
    newest = saved[-1] if saved else None
    if newest and not (newest / "state").is_dir():
        finding = "the checkpoint has no state/ to resume from"
        hint = f"start a new run from it: --model {newest}"
        raise InputError("checkpoint_state", str(newest), finding, hint=hint)
    return newest


def checkpoint_facts(checkpoint: Path | None) -> dict[str, str]:
    """Return what must be the same on all machines with a checkpoint; `--resume` sends it to others."""
    name = "the checkpoint in --out"
    if checkpoint is None:
        return {name: "none"} if is_main() else {}
    files = checkpoint / FILES
    digest = hashlib.sha256(files.read_bytes()).hexdigest()[:16] if files.is_file() else "no digest"
    return {name: f"{checkpoint.name} ({digest})"}


def check_files(checkpoint: Path) -> None:
    """Check that all files of a checkpoint are as the run wrote them.

    Raises:
        InputError: `checkpoint_state`: a file was added, removed or changed, or the list of files is
            missing.
    """
    try:
        written = dict(json.loads((checkpoint / FILES).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        finding, names = f"cannot read the list of its files: {error}", [FILES]
    else:
        digests = _digests(checkpoint)
        names = [n for n in sorted({*written, *digests}) if written.get(n) != digests.get(n)]
        finding = f"the file is not as the run wrote it; {count(len(names), 'file')} differ"
    if names:
        hint = (
            "restore the checkpoint, write an earlier one's name into checkpoints/latest, or start "
        )
        hint += f"a new run from it: --model {checkpoint}"
        raise InputError("checkpoint_state", str(checkpoint / names[0]), finding, hint=hint)


def _digests(checkpoint: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name != FILES:
            with path.open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def discard_after(out: Path, global_step: int) -> None:
    """Delete checkpoints of later updates, and incomplete checkpoints of killed runs."""
    for path in (out / "checkpoints").glob(f".{PREFIX}*"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    for step, path in checkpoints(out).items():
        if step > global_step:
            remove_directory(path)


def write_model(
    path: Path, model: PreTrainedModel, source: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model directory with the `other_files` of `source`; see `save_checkpoint`."""
    path.mkdir(parents=True)
    save = save_model if hasattr(model, "peft_config") else save_weights
    save(model, path, dict(weights or model.state_dict()))
    for name in other_files(source)[0]:
        if not (path / name).exists():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, path / name)


def other_files(source: Path) -> tuple[list[Path], list[Path]]:
    """List the files of a model directory that are not weights, relative to it.

    Examples are the files of tokenizers and processors, chat templates and licences. Weights in
    any format, hidden files (`.git`), and the state of the run that wrote the model are ignored.

    Returns:
        The files that checkpoints copy, and those that they leave out: links out of the directory,
        directories with another model or run, and anything that cannot be read.
    """
    # In the cache of the Hugging Face Hub, all files are links to the repository's blobs.
    is_snapshot = source.resolve().parent.name == "snapshots"
    inside = source.resolve().parents[1] if is_snapshot else source.resolve()
    copied, left_out = list[Path](), list[Path]()

    def visit(folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            name = path.relative_to(source)
            is_link_out = not path.resolve().is_relative_to(inside)
            if path.name.startswith(".") or str(name) in OWN or _is_weights(path):
                continue
            if path.is_dir() and not path.is_symlink():
                if (path / "config.json").exists() or not os.access(path, os.R_OK | os.X_OK):
                    left_out.append(name)
                else:
                    visit(path)
            elif path.is_file() and not is_link_out and os.access(path, os.R_OK):
                copied.append(name)
            else:
                left_out.append(name)

    visit(source)
    return copied, left_out


def _is_weights(path: Path) -> bool:
    """True for files with weights, and for the indices of sharded weights.

    Example:
        >>> [_is_weights(Path(name)) for name in ("model.safetensors.index.json", "vocab.json")]
        [True, False]
    """
    name = path.name.removesuffix(".index.json")
    return not path.is_dir() and Path(name).suffix.lower() in WEIGHTS


def checkpoints(out: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their number of updates, oldest first."""
    paths = (out / "checkpoints").glob(f"{PREFIX}*")
    steps = {path.name.removeprefix(PREFIX): path for path in paths}
    return {int(step): steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)}


def remove_directory(path: Path) -> None:
    """Rename a directory before deleting it, so that no checkpoint is ever half deleted."""
    if path.is_symlink():
        path.unlink()
        return
    # The name is hidden first; what is left of it after a kill is deleted by `discard_after`.
    removed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed)
