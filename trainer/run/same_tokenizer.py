"""Check that a model's token ids are those of a dataset."""

from __future__ import annotations

import json
from pathlib import Path

from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from trainer.config.train_config import TrainConfig

FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")


def check_tokenizers(config: TrainConfig, metadata: DatasetMetadata) -> list[str]:
    """Compare the tokenizers of all models of a run with the dataset's.

    Compares fingerprints if the dataset has one. Otherwise, as in a log of exact tokens converted
    without `--tokenizer`, only names of models can be compared, which differ for many reasons. A
    model directory without tokenizer files cannot be compared. A different chat template does not
    change the dataset's token ids.

    Args:
        config: Configuration of the run.
        metadata: Metadata of its dataset.

    Returns:
        Warnings and notes; one of them states what was compared.

    Raises:
        RolloutError: If a model has another tokenizer, unless `allow_other_tokenizer` is set.
    """
    if metadata.tokenizer_fingerprint is None:
        return [_names(config.model, metadata)]
    said = []
    for path in dict.fromkeys((config.model, config.reference_model, config.critic_model)):
        if path is None or not Path(path).is_dir():
            continue
        if not any(any(Path(path).glob(pattern)) for pattern in FILES):
            said.append(f"note: no tokenizer in {path}: not compared with the dataset's")
            continue
        tokenizer = load_tokenizer(path, needs_template=False)
        if tokenizer.fingerprint != metadata.tokenizer_fingerprint:
            said.append(_other_tokenizer(config, path, metadata.tokenizer or "another one"))
        elif path == config.model:
            said.append(f"note: the tokenizer of {path} is the dataset's (same fingerprint)")
        recorded = metadata.chat_template_fingerprint
        if path == config.model and recorded not in {None, tokenizer.template_fingerprint}:
            said.append(
                f"warning: the dataset's prompts have another chat template than {path}:"
                " it will be prompted differently than it was trained"
            )
    return said


def _names(model: str, metadata: DatasetMetadata) -> str:
    """Compare the names of the dataset's models with this model's."""
    names = metadata.models or tuple(name for name in (metadata.tokenizer,) if name)
    advice = "`rollouts convert --tokenizer DIR` stores a fingerprint to compare"
    if not names:
        return f"note: the dataset names no tokenizer and no model: not compared with {model}; {advice}"
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if {_last_part(name) for name in names} & _names_of(model):
        return f"note: compared the model's name ({shown}), not the tokenizer; {advice}"
    return (
        f"warning: the dataset's tokens are of {shown}, to go by its name another model than {model};"
        f" the tokenizers were not compared: {advice}"
    )


def _names_of(model: str) -> set[str]:
    """Return a model's names: of its directory, and in its configuration."""
    found = [str(Path(model).resolve()), str(Path(model).absolute())]
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
        found.append(str(config.get("_name_or_path") or model))
    except (OSError, ValueError, AttributeError):
        pass
    return {_last_part(name) for name in found}


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def _other_tokenizer(config: TrainConfig, path: str, name: str) -> str:
    if not config.allow_other_tokenizer:
        raise RolloutError(
            "tokenizer_fingerprint",
            config.dataset,
            f"token ids of another tokenizer ({name})",
            f"those of {path}",
            "train the model whose tokenizer made the ids; one that only has more tokens:"
            " --set allow_other_tokenizer=true",
        )
    return f"warning: the tokenizer of {path} is not the dataset's ({name})"
