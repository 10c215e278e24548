"""Open the pictures of a run, after checks of every picture and of the models that see them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import polars as pl
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensor

from rollout_io.dataset.blobs import stores_of
from rollout_io.retokenize.processor import load_image_processor
from schemas.errors import InputError
from trainer.batches.picture_reader import PictureReader, prepare
from trainer.checks import Rule, refuse
from trainer.distributed.sharding import is_sharded
from trainer.models.layers import plain_layers
from trainer.models.pictures import num_features, shows_pictures
from trainer.models.policy import load_policy
from trainer.models.self_check import check_pictures
from trainer.run.run import Run

PROBE = (64, 48)
"""Width and height of the picture with which models are checked, pixels."""
NUM_LOGITS = 256
"""Targets of a check whose logits are in memory at once."""

PICTURES = (
    Rule(
        "picture_model",
        pl.col("has_pictures") & ~pl.col("sees"),
        pl.format("it shows a picture, but the {} has no encoder of pictures", "model"),
    ),
    Rule(
        "picture_unknown",
        pl.col("has_unknown"),
        "a picture has no sha256, start or length, so what the model saw is unknown",
    ),
    Rule(
        "picture_tokens",
        pl.col("num_outside") > 0,
        pl.format("{} placeholders of pictures are at no picture", "num_outside"),
        "placeholders only where `pictures` has one",
    ),
    Rule(
        "picture_tokens",
        pl.col("trains_picture"),
        "loss_mask is true at a token of a picture",
        "false: pictures are not sampled",
    ),
)
"""Rules of rows, with the facts of `trainer.batches.pictures.picture_facts` and of a model."""


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
        refuse(seen, PICTURES, config)
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
    prepared = prepare(load_image_processor(path), noise, "a picture of noise")
    with plain_layers():
        check_pictures(policy, path, prepared, trees=trees)


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
            prepared = reader.prepare(picture, row)
            sizes[picture.size] = [num_features(one, prepared) for one in run.models.values()]
        for role, number in zip(run.models, sizes[picture.size], strict=True):
            if num_tokens != number:
                size = f"{picture.width} x {picture.height} pixels"
                finding = f"picture {name} ({size}) has {num_tokens} placeholders"
                expected = f"{number}, the features that the {role} has for this size"
                raise InputError("picture_tokens", row, finding, expected)
