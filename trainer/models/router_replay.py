"""Router replay (R3): make the mixture-of-experts layers of a model use recorded experts.

Transformers' routers return logits, weights and experts of each token; the expert layer uses the
last two. A forward hook on the router replaces the experts with the recorded ones, and the weights
with the values that the router would compute for these experts from its logits. Gradients therefore
reach the router through the weights, never through the choice of experts. Model code is not
modified. To support a family of models, add an entry to `WEIGHTS`: the class name of its routers,
and the function that computes weights. `Routes` holds the recorded experts of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from pipelines.merging.segments import Routing
from schemas.ragged import IntArray, Ragged


def _of_softmax(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def _of_mixtral(_: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().softmax(-1).gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True)


def _of_deepseek_v2(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    scores = logits.softmax(-1, dtype=torch.float32)
    return scores.gather(-1, experts) * float(router.routed_scaling_factor)


def _of_deepseek_v3(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(-1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * float(router.routed_scaling_factor)


WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "Qwen2MoeTopKRouter": _of_softmax,
    "Qwen3MoeTopKRouter": _of_softmax,
    "OlmoeTopKRouter": _of_softmax,
    "MixtralTopKRouter": _of_mixtral,
    "DeepseekV2TopkRouter": _of_deepseek_v2,
    "DeepseekV3TopkRouter": _of_deepseek_v3,
}
"""Functions that compute weights [N, topk] of experts [N, topk] from logits [N, experts], by router
class.

Constraints on the choice, such as groups or a bias, do not affect the weights in these families.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routers:
    """Routers of a model from a supported family.

    Attributes:
        by_layer: Router by layer number, for layers that have one.
        num_layers: Number of layers, including layers without a router.
        num_experts: Number of experts that each router chooses from.
        topk: Number of experts per token.
    """

    by_layer: dict[int, Any]
    num_layers: int
    num_experts: int
    topk: int


def routers_of(model: Any) -> Routers | None:
    """Find the routers of a Transformers model; return None unless its family is in `WEIGHTS`."""
    layers = list(getattr(model.base_model, "layers", ()))
    by_layer = {
        number: module
        for number, layer in enumerate(layers)
        for module in layer.modules()
        if type(module).__name__ in WEIGHTS
    }
    if not by_layer:
        return None
    router = next(iter(by_layer.values()))
    return Routers(
        by_layer=by_layer,
        num_layers=len(layers),
        num_experts=int(router.num_experts),
        topk=int(router.top_k),
    )


def make_replayable(model: Any) -> None:
    """Make the routers of a model, if supported, use the experts that `replayed` sets."""
    routers = routers_of(model)
    for router in routers.by_layer.values() if routers else ():
        router.recorded_routes = None
        router.register_forward_hook(_replay)


@contextmanager
def replayed(model: Any, routes: Tensor | None) -> Iterator[None]:
    """Use recorded experts in forward passes of a model inside this context.

    Args:
        model: Its routers were made replayable.
        routes: [N, layers, topk] experts of the N forwarded tokens, -1 where the model's own router
            decides; None: the router decides for all tokens.
    """
    if routes is None:
        yield
        return
    routers = routers_of(model)
    by_layer = routers.by_layer if routers else {}
    with _set({router: routes[:, layer] for layer, router in by_layer.items()}):
        yield


@contextmanager
def _set(routes: Mapping[Any, Tensor | None]) -> Iterator[None]:
    """Set the routes ([N, topk]) of some routers inside this context."""
    before = {router: router.recorded_routes for router in routes}
    try:
        for router, one in routes.items():
            router.recorded_routes = one
        yield
    finally:
        for router, one in before.items():
            router.recorded_routes = one


def same_routes(
    layer: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a layer's forward pass and its recomputation, for `torch.utils.checkpoint`.

    The second context is needed because the backward pass runs outside `replayed`.
    """
    routers: Any = [m for m in layer.modules() if hasattr(m, "recorded_routes")]
    return nullcontext(), _set({router: router.recorded_routes for router in routers})


def _replay(
    router: Any, _: object, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward hook that replaces the experts that a router chose, and their weights.

    The router's logits are kept.
    """
    routes = router.recorded_routes
    if routes is None:
        return output
    logits, own_weights, own_experts = output
    recorded = routes.to(own_experts.dtype)
    is_routed = (recorded != NO_ROUTE).all(-1, keepdim=True)
    experts = torch.where(is_routed, recorded, own_experts)
    weights = WEIGHTS[type(router).__name__](router, logits, experts)
    return logits, torch.where(is_routed, weights, own_weights), experts


@contextmanager
def recorded(model: Any) -> Iterator[Callable[[], Tensor | None]]:
    """Record the experts of every token that a model forwards in this context.

    Yields:
        Function that returns the experts of the last forward pass: [N, layers, topk] int16 on the
        model's device, 0 in layers without a router; None without supported routers.
    """
    routers = routers_of(model)
    taken: dict[int, Tensor] = {}

    def take(layer: int, _: object, __: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        taken[layer] = output[2].to(torch.int16)

    def stacked() -> Tensor | None:
        if routers is None:
            return None
        nothing = torch.zeros_like(next(iter(taken.values())))
        return torch.stack([taken.get(n, nothing) for n in range(routers.num_layers)], 1)

    by_layer = routers.by_layer if routers else {}
    handles = [r.register_forward_hook(partial(take, layer)) for layer, r in by_layer.items()]
    try:
        yield stacked
    finally:
        for handle in handles:
            handle.remove()


NO_ROUTE = -1
"""Placeholder for experts that were not recorded: the model's own router decides."""
ExpertArray = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Routes:
    """Recorded experts of the first tokens of R rows, each a prompt followed by a response.

    Attributes:
        tokens: R rows of [tokens, layers * topk] int16; a row may be empty.
        num_layers: Number of layers in the model, including layers without experts.
        topk: Experts per token and layer.
    """

    tokens: Ragged
    num_layers: int
    topk: int

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray) -> Routes:
        """Wrap an Arrow column `rollout_expert_indices`."""
        routing = Routing.of(column)
        return cls(routing.tokens, *routing.shape)

    def at(self, row: IntArray, depth: IntArray) -> ExpertArray:
        """Look up the experts of N tokens by row and position ([N, layers, topk]; -1 if unknown).

        Example:
            >>> values = np.array([[0, 3], [1, 2]], np.int16)  # two tokens of one row, one layer
            >>> routes = Routes(Ragged(values, np.array([0, 2]), np.ones(1, bool)), 1, 2)
            >>> routes.at(np.array([0, 0]), np.array([1, 2])).tolist()
            [[[1, 2]], [[-1, -1]]]
        """
        start, end = self.tokens.offsets[row], self.tokens.offsets[row + 1]
        is_recorded = start + depth < end
        routes = np.full((len(row), self.num_layers * self.topk), NO_ROUTE, np.int16)
        routes[is_recorded] = self.tokens.values[(start + depth)[is_recorded]]
        return routes.reshape(-1, self.num_layers, self.topk)

    def numbered(self, rows: IntArray, lengths: IntArray) -> list[IntArray]:
        """Map each token's experts to an integer that is unique to that choice of experts.

        Two tokens get the same integer if they have the same experts in every layer; tokens without
        recorded experts get 0.

        Args:
            rows: [K] rows.
            lengths: [K] number of tokens to map in each row, from its first token on.

        Returns:
            K arrays, [length] int64 each.
        """
        width = self.tokens.values.itemsize * self.num_layers * self.topk
        numbers: dict[bytes, int] = {}
        numbered = []
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            recorded = self.tokens.row(row)[:length].tobytes()
            parts = [recorded[at : at + width] for at in range(0, len(recorded), width)]
            number = np.zeros(length, np.int64)  # 0: the model's own router decides
            number[: len(parts)] = [numbers.setdefault(part, len(numbers) + 1) for part in parts]
            numbered.append(number)
        return numbered
