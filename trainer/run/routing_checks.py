"""Check that the models can use the recorded experts (R3), before the first update."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.tables import ROUTING
from schemas.errors import InputError, first_of
from trainer.batches.recorded_routes import Routes
from trainer.models.router_replay import WEIGHTS, Routers, routers_of

RULE = "replay_routing"
IGNORE = "pass --set batch.replay_routing=false to train without the recorded experts"
KEYS = ["trajectory_id", "step_index"]
FACTS = pl.Struct({"num_routed": pl.Int64, "highest": pl.Int64, "repeats": pl.Boolean})


def check_replay(
    rollouts: pl.LazyFrame, models: dict[str, Any], rows: pl.DataFrame, *, replays: bool
) -> str:
    """Check the recorded experts of the rows to train on against the models that will use them.

    `models` maps model directories to models. Returns a note or warning for the user, or "".

    Raises:
        InputError: Rows have recorded experts that are not ignored, and a model cannot use them:
            its family is unsupported, or its layers or experts differ.
    """
    if ROUTING not in rollouts.collect_schema():
        return ""
    known = rollouts.filter(pl.col(ROUTING).is_not_null()).select(KEYS).collect()
    if rows.join(known, on=KEYS, how="semi").is_empty():
        return ""
    if not replays:
        text = "note: recorded experts (rollout_expert_indices) are ignored"
        return f"{text}, because replay_routing is false"
    kind: Any = rollouts.collect_schema()[ROUTING]
    shape: tuple[int, ...] = kind.inner.shape
    facts = None
    for path, model in models.items():
        routers = _fitting(path, model, shape)
        facts = rows.join(_facts(rollouts, list(routers.by_layer)), on=KEYS, maintain_order="left")
        _check_experts(facts, path, routers)
    assert facts is not None
    return _free_tokens(facts)


def _fitting(path: str, model: Any, shape: tuple[int, ...]) -> Routers:
    routers = routers_of(model)
    if routers is None:
        families = ", ".join(sorted({name.split("Top")[0] for name in WEIGHTS}))
        got = "cannot replay recorded experts (rollout_expert_indices) in"
        got = f"{got} {model.config.model_type}; supported families: {families}"
        raise InputError(RULE, path, got, hint=IGNORE)
    wanted = routers.num_layers, routers.topk
    if shape != wanted:
        got, expected = (f"{a} layers with {b} experts per token" for a, b in (shape, wanted))
        hint = f"train the model that sampled the dataset, or {IGNORE}"
        raise InputError(RULE, ROUTING, got, f"{expected}, as in {path}", hint)
    return routers


def _facts(rollouts: pl.LazyFrame, layers: list[int]) -> pl.DataFrame:
    """Summarise the recorded experts of each row in the layers that have a router.

    Returns the number of tokens with recorded experts, the largest expert id, and whether any token
    has the same expert twice.
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
        found = {"num_routed": lengths, "highest": highest, "repeats": repeats}
        return pl.DataFrame(found).to_struct(column.name)

    facts = pl.col(ROUTING).map_batches(look, return_dtype=FACTS, is_elementwise=True)
    return rollouts.select(*KEYS, facts=facts).unnest("facts").collect(engine="streaming")


def _check_experts(rows: pl.DataFrame, path: str, routers: Routers) -> None:
    last = routers.num_experts - 1
    for breach, got, expected in (
        (pl.col("highest") > last, "expert {}", f"0 to {last}, the experts of {path}"),
        (pl.col("repeats"), "the same expert twice", f"{routers.topk} different experts per token"),
    ):
        bad = rows.filter(breach)
        if len(bad):
            where = first_of(bad["name"][0], len(bad))
            got = got.format(bad["highest"][0])
            hint = f"train the model that sampled the dataset, or {IGNORE}"
            raise InputError(RULE, where, got, expected, hint)


def _free_tokens(rows: pl.DataFrame) -> str:
    tokens = rows["num_forwarded_tokens"]
    free = (tokens - rows["num_routed"]).clip(lower_bound=0).sum()
    if not free:
        return ""
    return (
        f"{free} of {tokens.sum()} tokens to forward have no recorded experts"
        " (rollout_expert_indices): the model chooses their experts"
    )
