"""Whether a model's token ids are those of a dataset."""

from __future__ import annotations

from pathlib import Path

from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from trainer.config import TrainConfig

FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")


def check_tokenizers(config: TrainConfig, metadata: DatasetMetadata) -> list[str]:
    """Compare the tokenizers of all models of a run with what the dataset says of its own.

    Datasets without a fingerprint, such as those an engine's token ids were recorded in, say
    nothing. A model directory without tokenizer files cannot be compared. Another chat template
    changes no token id of the dataset.

    Args:
        config: The run's configuration.
        metadata: Of its dataset.

    Returns:
        Warnings and notes for people.

    Raises:
        RolloutError: A model has another tokenizer, unless `allow_other_tokenizer`.
    """
    if metadata.tokenizer_fingerprint is None:
        return []
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
        recorded = metadata.chat_template_fingerprint
        if path == config.model and recorded not in {None, tokenizer.template_fingerprint}:
            said.append(
                f"warning: the dataset's prompts have another chat template than {path}:"
                " it will be prompted differently than it was trained"
            )
    return said


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
