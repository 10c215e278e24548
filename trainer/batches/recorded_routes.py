"""Recorded routing (R3) of a batch: the experts that the sampler's model chose for each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.merging.segments import Routing
from schemas.ragged import IntArray, Ragged

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
