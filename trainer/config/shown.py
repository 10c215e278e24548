"""Show a configuration as TOML with the meaning of each key, the most common keys first."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from itertools import pairwise
from typing import Any

from trainer.config.train_config import Sections, to_toml

COMMON = (
    *("data.dataset", "model.path", "run.out", "optimizer.learning_rate"),
    *("batch.groups_per_batch", "batch.groups_per_mini_batch", "batch.num_epochs"),
    *("batch.max_updates", "batch.tokens_per_micro_batch", "advantage.estimator"),
    *("loss.policy_loss_type", "model.lora_rank", "run.save_every_updates"),
)
"""Keys that people set most, in this order."""


def shown(config: Sections) -> str:
    """Return a configuration as TOML; each key is followed by the first sentence of its meaning.

    Sections and keys in `COMMON` come first.
    """
    values = dataclasses.asdict(config)
    types = typing.get_type_hints(type(config))
    rank = {key: number for number, key in enumerate(COMMON)}
    firsts = dict.fromkeys(key.partition(".")[0] for key in COMMON)
    ordered = {
        section: dict(
            sorted(
                values[section].items(), key=lambda kv: rank.get(f"{section}.{kv[0]}", len(rank))
            )
        )
        for section in [*firsts, *(values.keys() - firsts.keys())]
    }
    notes = {f"{s}.{key}": text for s in ordered for key, text in meanings(types[s]).items()}
    return to_toml(ordered, notes)


def meanings(kind: type[Any]) -> dict[str, str]:
    """Return the first sentence of the docstring below each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for node, doc in pairwise(body.body):
        if isinstance(node, ast.AnnAssign) and isinstance(doc, ast.Expr):
            text = " ".join(str(ast.literal_eval(doc.value)).split())
            required = "Required. " if text.startswith("Required. ") else ""
            sentence = text.removeprefix("Required. ").partition(". ")[0]
            texts[ast.unparse(node.target)] = f"{required}{sentence.removesuffix('.')}."
    return texts
