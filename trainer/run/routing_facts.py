"""Facts about the recorded experts (R3) and the models that would use them, for `trainer.checks`."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.frames import ROUTING
from trainer import checks
from trainer.batches.recorded_routes import Routes
from trainer.config.train_config import TrainConfig
from trainer.models.router_replay import WEIGHTS, routers_of

KEYS = ["trajectory_id", "step_index"]
FACTS = pl.Struct(
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
        of_model = _of_model(path, model, kind.inner.shape)
        checks.refuse(of_model, checks.ROUTERS, config)
        routers = routers_of(model)
        assert routers is not None
        routed = rows.join(_facts(rollouts, [*routers.by_layer]), on=KEYS, maintain_order="left")
        routed = routed.join(of_model.drop("name"), how="cross")
        checks.refuse(routed, checks.ROUTING, config)
    return _free_tokens(routed)


def _of_model(path: str, model: Any, recorded: tuple[int, int]) -> pl.DataFrame:
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


def _facts(rollouts: pl.LazyFrame, layers: list[int]) -> pl.DataFrame:
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

    facts = pl.col(ROUTING).map_batches(look, return_dtype=FACTS, is_elementwise=True)
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
