"""What `trainer.checks` needs to know of models: tokenizers, pictures, recorded experts, and files."""

from __future__ import annotations

import hashlib
import inspect
import json
from functools import cache
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensor

from pipelines.frames import ROUTING
from rollout_io.dataset.blobs import stores_of
from rollout_io.retokenize.chat_template import TEMPLATES, find_template
from rollout_io.retokenize.local import has_tokenizer
from rollout_io.retokenize.processor import load_image_processor
from rollout_io.retokenize.tokenizer import load_tokenizer, template_fingerprint
from schemas.errors import InputError
from schemas.metadata import DatasetMetadata
from trainer import checks
from trainer.batches.pictures import PictureReader, preprocess
from trainer.config.train_config import TrainConfig, uses
from trainer.distributed.accelerator import is_sharded
from trainer.distributed.meeting import machines
from trainer.distributed.processes import is_first_here
from trainer.models.layers import plain_layers
from trainer.models.pictures import num_features, shows_pictures
from trainer.models.policy import load_policy
from trainer.models.router_replay import WEIGHTS, Routes, routers_of
from trainer.models.self_check import check_pictures
from trainer.run.messages import Remark
from trainer.run.run import Run


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
            checks.refuse(pl.DataFrame([facts]), [checks.TOKENIZER], config)
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


PROBE = (64, 48)
"""Width and height of the picture with which models are checked, pixels."""
NUM_LOGITS = 256
"""Targets of a check whose logits are in memory at once."""


def open_pictures(run: Run, rows: pl.DataFrame) -> PictureReader | None:
    """Check the pictures of rows to train on, and return what reads them; None: none are shown.

    Args:
        run: A run with its models and dataset.
        rows: Rows to train on, as indexed by `trainer.batch.index_rows`.

    Raises:
        InvariantError, InputError: A picture or its tokens are unknown, the file is missing or was
            changed, it cannot be read, or its tokens are not those that the model has for it; a model
            does not see pictures, or not as its own forward pass does.
    """
    config = run.config
    facts = rows.select("name", "pictures").unnest("pictures")
    if config.data.pictures == "text" or not facts["has_pictures"].any():
        return None
    for role, model in run.models.items():
        seen = facts.with_columns(model=pl.lit(role), sees=pl.lit(shows_pictures(model)))
        checks.refuse(seen, checks.PICTURES, config)
    reader = PictureReader(config.model.path, stores_of(config.data.dataset))
    policy, path = run.whole_policy, config.model.path
    if isinstance(next(policy.parameters()), FakeTensor):  # its weights have no values
        return reader
    trees = config.batch.sequence_layout == "tree"
    if not is_sharded(policy):
        _check_policy(policy, path, trees=trees)
    elif run.accelerator.is_main_process:
        _check_directory(path, trees=trees)
    _check_tokens(reader, facts, run)
    return reader


@cache
def _check_directory(path: str, *, trees: bool) -> None:
    """Check a model whose parameters are sharded: once, with a copy of it that is not."""
    policy = load_policy(path, logprob_chunk_tokens=NUM_LOGITS, trees=trees, checks=False)
    _check_policy(policy, path, trees=trees)


def _check_policy(policy: Any, path: str, *, trees: bool) -> None:
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (*PROBE[::-1], 3), dtype=np.uint8))
    preprocessed = preprocess(load_image_processor(path), noise, "a picture of noise")
    with plain_layers():
        check_pictures(policy, path, preprocessed, trees=trees)


def _check_tokens(reader: PictureReader, facts: pl.DataFrame, run: Run) -> None:
    """Check that each picture has as many tokens as the models have features of it.

    That number follows from the size of a picture, so one picture of each size is encoded. Each
    process checks a share of the pictures.
    """
    listed = facts.explode("shown").drop_nulls("shown").unnest("shown")
    pairs = listed.unique(["sha256", "num_features"], keep="first", maintain_order=True)
    accelerator, sizes = run.accelerator, dict[tuple[int, int], list[int]]()
    share = pairs[accelerator.process_index :: accelerator.num_processes]
    for row, name, num_tokens in share.select("name", "sha256", "num_features").iter_rows():
        picture = reader.open(name, row)
        if picture.size not in sizes:
            preprocessed = reader.preprocess(picture, row)
            sizes[picture.size] = [num_features(one, preprocessed) for one in run.models.values()]
        for role, number in zip(run.models, sizes[picture.size], strict=True):
            if num_tokens != number:
                size = f"{picture.width} x {picture.height} pixels"
                finding = f"picture {name} ({size}) has {num_tokens} placeholders"
                expected = f"{number}, the features that the {role} has for this size"
                raise InputError("picture_tokens", row, finding, expected)


KEYS = ["trajectory_id", "step_index"]
ROUTE_FACTS = pl.Struct(
    {"num_routed": pl.Int64, "highest_expert": pl.Int64, "repeats_expert": pl.Boolean}
)


def check_replay(
    rollouts: pl.LazyFrame, models: dict[str, Any], rows: pl.DataFrame, config: TrainConfig
) -> str:
    """Check the recorded experts of the rows to train on against the models that will use them.

    `models` maps model directories to models. Returns a note or warning for the user, or "".

    Raises:
        InputError: Rows have recorded experts that are not ignored, and a model cannot use them:
            its family is unsupported, or its layers or experts differ.
    """
    if ROUTING not in rollouts.collect_schema():
        return ""
    recorded = rollouts.filter(pl.col(ROUTING).is_not_null()).select(KEYS).collect()
    if rows.join(recorded, on=KEYS, how="semi").is_empty():
        return ""
    if not config.batch.replay_routing:
        text = "note: recorded experts (rollout_expert_indices) are ignored"
        return f"{text}, because replay_routing is false"
    kind: Any = rollouts.collect_schema()[ROUTING]
    for path, model in models.items():
        of_model = _routers_of_model(path, model, kind.inner.shape)
        checks.refuse(of_model, checks.ROUTERS, config)
        routers = routers_of(model)
        assert routers is not None
        routed = rows.join(
            _route_facts(rollouts, [*routers.by_layer]), on=KEYS, maintain_order="left"
        )
        routed = routed.join(of_model.drop("name"), how="cross")
        checks.refuse(routed, checks.ROUTING, config)
    return _free_tokens(routed)


def _routers_of_model(path: str, model: Any, recorded: tuple[int, int]) -> pl.DataFrame:
    """Return one row about the routers of a model; those of an unsupported family are null."""
    routers = routers_of(model)
    facts = {
        "name": ROUTING if routers else path,
        "model": path,
        "family": model.config.model_type,
        "families": ", ".join(sorted({name.split("Top")[0] for name in WEIGHTS})),
        "num_recorded_layers": recorded[0],
        "recorded_topk": recorded[1],
        "num_layers": routers and routers.num_layers,
        "topk": routers and routers.topk,
        "num_experts": routers and routers.num_experts,
    }
    return pl.DataFrame([facts])


def _route_facts(rollouts: pl.LazyFrame, layers: list[int]) -> pl.DataFrame:
    """Summarise the recorded experts of each row in the layers that have a router.

    Returns `num_routed` (tokens with recorded experts), `highest_expert`, and `repeats_expert` (whether
    a token has the same expert twice).
    """

    def look(column: pl.Series) -> pl.Series:
        routes = Routes.from_arrow(pa.chunked_array([column.to_arrow()]))
        lengths = routes.tokens.lengths
        values = routes.tokens.values.reshape(-1, routes.num_layers, routes.topk)[:, layers]
        highest = np.full(len(lengths), -1, np.int64)
        repeats = np.zeros(len(lengths), np.bool_)
        if len(values):
            starts, filled = routes.tokens.offsets[:-1][lengths > 0], lengths > 0
            again = (np.diff(np.sort(values, -1), axis=-1) == 0).any((1, 2))
            highest[filled] = np.maximum.reduceat(values.max((1, 2)), starts)
            repeats[filled] = np.logical_or.reduceat(again, starts)
        values_of = {"num_routed": lengths, "highest_expert": highest, "repeats_expert": repeats}
        return pl.DataFrame(values_of).to_struct(column.name)

    facts = pl.col(ROUTING).map_batches(look, return_dtype=ROUTE_FACTS, is_elementwise=True)
    return rollouts.select(*KEYS, facts=facts).unnest("facts").collect(engine="streaming")


def _free_tokens(rows: pl.DataFrame) -> str:
    tokens = rows["num_forwarded_tokens"]
    free = (tokens - rows["num_routed"]).clip(lower_bound=0).sum()
    if not free:
        return ""
    return (
        f"{free} of {tokens.sum()} tokens to forward have no recorded experts"
        " (rollout_expert_indices): the model chooses their experts"
    )


def model_digests(config: TrainConfig) -> dict[str, Any]:
    """Hash the models' directories and the files of the user's functions, by key of the configuration.

    Empty on a single machine, and in all but one process of each machine, because it reads all
    weights (about 1 s per GB).
    """
    if len(set(machines())) == 1 or not is_first_here():
        return {}
    models = {
        "model.path": config.model.path,
        "model.critic_model": config.model.critic_model,
        "loss.reference_model": config.loss.reference_model,
    }
    functions = {
        key: inspect.getfile(inspect.unwrap(one.function))
        for key, one in uses(config).items()
        if one.location
    }
    digests = dict[str, Any]()
    for key, path in (models | functions).items():
        if path:
            files = _files(Path(path))
            digests |= {f"{key}: {name}": _digest(file) for name, file in files.items()}
            digests[f"{key}: number of files"] = len(files)
    return digests


def _files(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        return {path.name: path}
    files = {str(file.relative_to(path)): file for file in sorted(path.rglob("*"))}
    return {name: file for name, file in files.items() if file.is_file() and name[0] != "."}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
