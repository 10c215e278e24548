"""Check that a model and a dataset use the same token ids."""

from __future__ import annotations

import json
from logging import WARNING
from pathlib import Path

import polars as pl

from rollout_io.retokenize.chat_template import TEMPLATES, find_template
from rollout_io.retokenize.local import has_tokenizer
from rollout_io.retokenize.tokenizer import load_tokenizer, template_fingerprint
from schemas.errors import InputError
from schemas.metadata import DatasetMetadata
from trainer.checks import TOKENIZERS, refuse
from trainer.config.train_config import TrainConfig
from trainer.run.messages import Remark


def check_tokenizers(
    config: TrainConfig, metadata: DatasetMetadata, *, notes_match: bool = True
) -> list[Remark]:
    """Compare the tokenizers of all models of a run with the dataset's.

    If the dataset has a fingerprint, fingerprints are compared. Otherwise (for example, if a log of
    exact tokens was converted without `--tokenizer`) only model names can be compared, which may
    differ for other reasons. A model directory without tokenizer files cannot be compared. A
    different chat template does not change the dataset's token ids.

    Returns warnings and notes, which state what was compared. `notes_match=False` omits the note
    about matching tokenizers, and only notes a different chat template; use it for datasets that
    the policy itself sampled with the configured template.

    Raises:
        InputError: A model has a different tokenizer, unless `allow_other_tokenizer` is set.
    """
    if metadata.tokenizer_fingerprint is None:
        return [_names(config.model.path, metadata)]
    remarks = []
    for path in dict.fromkeys(
        (config.model.path, config.loss.reference_model, config.model.critic_model)
    ):
        if path is None or not Path(path).is_dir():
            continue
        if not has_tokenizer(Path(path)):
            remarks.append(Remark(f"note: {path} has no tokenizer to compare with the dataset's"))
            continue
        try:
            tokenizer = load_tokenizer(path, needs_template=False)
        except InputError as error:
            if not config.data.allow_other_tokenizer:
                raise
            remarks.append(
                Remark(f"the tokenizer of {path} was not compared: {error.got}", WARNING)
            )
            continue
        if tokenizer.fingerprint != metadata.tokenizer_fingerprint:
            facts = {
                "name": config.data.dataset,
                "of_dataset": metadata.tokenizer_fingerprint,
                "tokenizer": metadata.tokenizer or "name unknown",
                "model": path,
                "fingerprint": tokenizer.fingerprint,
            }
            refuse(pl.DataFrame([facts]), TOKENIZERS, config)
            text = f"the tokenizer of {path} differs from the dataset's ({facts['tokenizer']})"
            remarks.append(Remark(text, WARNING))
        elif path == config.model.path and notes_match:
            remarks.append(Remark(f"note: {path} has the dataset's tokenizer (fingerprints match)"))
        recorded = metadata.chat_template_fingerprint
        if path == config.model.path and recorded not in {None, tokenizer.template_fingerprint}:
            remarks.append(_other_template(path, recorded, is_chosen=not notes_match))
    return remarks


def _other_template(path: str, fingerprint: str | None, *, is_chosen: bool) -> Remark:
    """Warn that the model's chat template differs from the dataset's, with a hint for serving.

    Only a note if the run's own configuration chose the other template (`is_chosen`).
    """
    name = next(
        (n for n in TEMPLATES if template_fingerprint(find_template(n)) == fingerprint), None
    )
    file = f'"$(rollouts formats --templates {name})"' if name else "TEMPLATE"
    text = (
        f"the chat template of the dataset's prompts{f' ({name})' if name else ''} differs from the"
        f" template of {path}: prompts at inference will differ from prompts in training"
        f"\nHint: vllm serve CHECKPOINT --chat-template {file}, or"
        f" cp {file} CHECKPOINT/chat_template.jinja"
    )
    return Remark(f"note: {text}") if is_chosen else Remark(text, WARNING)


def _names(model: str, metadata: DatasetMetadata) -> Remark:
    """Compare the names of this model with the names of the models that made the dataset."""
    names = metadata.models or tuple(name for name in (metadata.tokenizer,) if name)
    advice = "convert with --tokenizer DIR to record a fingerprint"
    if not names:
        missing = "the dataset records neither a tokenizer nor a model"
        return Remark(f"note: {missing}, so {model} was not compared with it; {advice}")
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if any(a in b or b in a for a in map(_last_part, names) for b in _names_of(model)):
        return Remark(
            f"note: the model's name matches the dataset ({shown}), but the tokenizers were not compared; {advice}"
        )
    text = (
        f"the dataset was sampled from {shown}; whether {model} has the same tokenizer is unknown:"
        f" {advice}"
    )
    return Remark(text, WARNING)


def _names_of(model: str) -> set[str]:
    """Return the names of a model, from its directory and from its configuration.

    Names shorter than 4 letters and digits are left out: they are part of many others.
    """
    paths = [str(Path(model).resolve()), str(Path(model).absolute())]
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
        paths.append(str(config.get("_name_or_path") or model))
    except (OSError, ValueError, AttributeError, RecursionError):
        pass
    return {name for name in map(_last_part, paths) if len(name) >= 4}


def _last_part(name: str) -> str:
    """Return the last part of a name, without case and punctuation.

    Example:
        >>> _last_part("HuggingFaceTB/SmolLM2-135M-Instruct")
        'smollm2135minstruct'
    """
    return "".join(filter(str.isalnum, name.rstrip("/").rpartition("/")[2].casefold()))
