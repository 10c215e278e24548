"""Episodes of verifiers v1, as its evaluations and prime-rl write them: lines of `traces.jsonl`.

    {"id": "0d19", "task": {"key": "c8e2", ...}, "group": {"id": "g0"}, "ok": true, "errors": [],
     "run": {"type": "train", "work": {"step": 3, "policy": {"start": 2, "end": 3}}},
     "traces": [{"agent": {"name": "agent", "trainable": true},
                 "nodes": [{"parent": 0, "message": {...}, "sampled": true, "semantic_parents": [],
                            "token_ids": [...], "mask": [...], "logprobs": [...]}, ...],
                 "calls": [{"node": 2, "finish_reason": "stop", "sampling": {...}}],
                 "rewards": {"correct": {"score": 1.0, "weight": 1.0}}, "metrics": {...}}]}

A node holds the tokens that its message adds; the tokens of a path from the root are what the model
saw. `mask` is true where they were sampled, `logprobs` are of those alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.adapters import Conversation, Step
from rollout_io.logs.fields import logprobs
from rollout_io.logs.jsonl import decode_line
from rollout_io.logs.messages import openai_tools, read_messages, text_of
from rollout_io.logs.tokens import INT32_MAX, broken, strict_ids
from schemas.errors import RolloutError

_ASK = "sample with the train client of verifiers: its nodes hold the engine's tokens"
_NO_JSON = msgspec.Raw(b"null")
Version = Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1e38)]


class Failure(msgspec.Struct, gc=False):
    """An error of an episode or a trace."""

    type: str | None = None
    message: str | None = None


class _Link(msgspec.Struct, gc=False):
    node: int
    type: str


class _Node(msgspec.Struct, gc=False):
    message: msgspec.Raw
    parent: int | None = None
    sampled: bool = False
    semantic_parents: list[_Link] | None = None
    tools: msgspec.Raw = _NO_JSON
    token_ids: msgspec.Raw = _NO_JSON
    mask: list[bool] | None = None
    logprobs: list[float] | None = None


class _Sampling(msgspec.Struct, gc=False):
    temperature: Share | None = None
    top_p: Share | None = None


class _Call(msgspec.Struct, gc=False):
    node: int | None = None
    finish_reason: str | None = None
    sampling: _Sampling | None = None


class _Agent(msgspec.Struct, gc=False):
    name: str = "agent"
    trainable: bool = True


class _Reward(msgspec.Struct, gc=False):
    score: float
    weight: float = 1.0


class Trace(msgspec.Struct, gc=False):
    """What one agent did in an episode."""

    agent: _Agent = msgspec.field(default_factory=_Agent)
    nodes: list[_Node] = []
    calls: list[_Call] = []
    tools: msgspec.Raw = _NO_JSON
    rewards: dict[str, _Reward | None] | None = None
    metrics: dict[str, float | bool | None] | None = None
    ok: bool = True
    is_timeout: bool = False
    stop_condition: str | None = None
    errors: list[Failure] | None = None

    @property
    def reward(self) -> float | None:
        """Scores times weights, summed; None where none was given."""
        known = [r.score * r.weight for r in (self.rewards or {}).values() if r is not None]
        return sum(known) if known else None


_ANY = msgspec.json.Decoder(Any)


class Graph:
    """The nodes of a trace with their tokens.

    Raises:
        RolloutError: dangling_reference: a parent that is no earlier node; lengths_align,
            logprobs_*, token_range: tokens that cannot be used.
    """

    def __init__(self, trace: Trace, where: str) -> None:
        self.trace, self.where = trace, where
        self.calls = {call.node: call for call in trace.calls if call.node is not None}
        places = [self._place(i) for i in range(len(trace.nodes))]
        for i, node in enumerate(trace.nodes):
            if node.parent is not None and not 0 <= node.parent < i:
                expected = f"one of the {i} nodes before"
                raise RolloutError("dangling_reference", places[i], "a parent not there", expected)
            if not bytes(node.message).startswith(b"{"):
                raise RolloutError(
                    "record_type", places[i], "a message of another type", "an object"
                )
        nodes = list(zip(trace.nodes, places, strict=True))
        self.tokens = [_tokens(node, place) for node, place in nodes]
        self.masks = [_mask(n, t, p) for (n, p), t in zip(nodes, self.tokens, strict=True)]
        parents = {node.parent for node in trace.nodes}
        self.leaves = [i for i in range(len(trace.nodes)) if i not in parents]
        self.trained = self._trained()

    @property
    def sampled(self) -> list[int]:
        """The nodes of the model's own messages."""
        nodes = self.trace.nodes
        return [i for i, n in enumerate(nodes) if n.sampled or self.masks[i].any()]

    @property
    def without_tokens(self) -> list[int]:
        """The model's own messages that have no tokens."""
        return [i for i in self.sampled if not len(self.tokens[i])]

    def steps(self, *, failed: bool) -> Iterator[Step]:
        """One step per model call; shared nodes are in the prompts of several, and sampled once.

        Args:
            failed: Whether calls may lack their tokens, for the run is not to be trained on.
        """
        for index in self.sampled:
            if len(self.tokens[index]):
                yield self._step(index, failed=failed)

    def conversations(self) -> Iterator[Conversation]:
        """The text of each path from the root to a leaf on which the model spoke."""
        sampled = set(self.sampled)
        for leaf in self.leaves:
            path = self._path(leaf)
            spoken = [i for i in path if i in sampled]
            if not spoken:
                continue
            place, call = self._place(leaf), self.calls.get(spoken[-1], _Call())
            sampling = call.sampling or _Sampling()
            tools = self.trace.nodes[path[0]].tools
            tools = self.trace.tools if bytes(tools) in {b"null", b"[]"} else tools
            yield Conversation(
                source=place,
                messages=read_messages(map(self._message, path), place),
                tools=openai_tools(decode_line(_ANY, bytes(tools), place)),
                trains=self.trace.agent.trainable and leaf in self.trained,
                stop_reason=call.finish_reason,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                agent=self.trace.agent.name,
            )

    def missing(self) -> RolloutError:
        """The error of a run of which some calls have no tokens."""
        index = self.without_tokens[0]
        expected = "the ids the engine saw and sampled"
        got = "a message of the model without `token_ids`, where others have them"
        return RolloutError("no_token_ids", self._place(index), got, expected, _ASK)

    def _step(self, index: int, *, failed: bool) -> Step:
        node, place, path = self.trace.nodes[index], self._place(index), self._path(index)
        mask, tokens = self.masks[index], self.tokens[index]
        where = np.flatnonzero(mask)
        if not len(where) and not failed:
            got = "a message of the model, none of whose tokens was sampled"
            raise broken("nonempty_response", place, got, "at least 1 token")
        start, stop = (int(where[0]), int(where[-1]) + 1) if len(where) else (len(mask),) * 2
        mask = mask[start:stop]
        call = self.calls.get(index, _Call())
        sampling = call.sampling or _Sampling()
        trained = self.trace.agent.trainable and index in self.trained
        messages = b",".join(bytes(self._message(i)) for i in path[:-1])
        return Step(
            source=place,
            prompt_token_ids=np.concatenate([*(self.tokens[i] for i in path[:-1]), tokens[:start]]),
            response_ids=tokens[start:stop],
            rollout_logprobs=_logprobs(node, mask, place),
            loss_mask=None if mask.all() else mask,
            spans=None if mask.all() else runs(mask),
            trains=trained,
            stop_reason=call.finish_reason,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            agent=self.trace.agent.name,
            messages=f"[{messages.decode()}]",
            response_text=text_of(decode_line(_ANY, bytes(node.message), place)),
        )

    def _trained(self) -> set[int]:
        """Nodes of branches that train: all but attempts at a compaction that was not gone on from."""
        nodes = self.trace.nodes
        links = [(i, link) for i, node in enumerate(nodes) for link in node.semantic_parents or ()]
        accepted = {link.node for _, link in links if link.type == "compaction"}
        attempts = {i for i, link in links if link.type == "compaction_attempt"}
        trained: set[int] = set()
        for leaf in self.leaves:
            index: int | None = None if leaf in attempts - accepted else leaf
            while index is not None and index not in trained:
                trained.add(index)
                index = nodes[index].parent
        return trained

    def _path(self, index: int) -> list[int]:
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.trace.nodes[at].parent
        return path[::-1]

    def _message(self, index: int) -> msgspec.Raw:
        return self.trace.nodes[index].message

    def _place(self, index: int) -> str:
        return f"{self.where}.nodes[{index}]"


def _tokens(node: _Node, where: str) -> npt.NDArray[np.int32]:
    text = bytes(node.token_ids)
    return np.zeros(0, np.int32) if text == b"null" else strict_ids(text, "message", where)


def _mask(node: _Node, tokens: npt.NDArray[np.int32], where: str) -> npt.NDArray[np.bool_]:
    mask = np.array(node.mask or [], np.bool_)
    if len(mask) != len(tokens):
        got = f"a mask of {len(mask)} for {len(tokens)} tokens"
        raise broken("lengths_align", where, got, "one per token")
    return mask


def _logprobs(
    node: _Node, mask: npt.NDArray[np.bool_], where: str
) -> npt.NDArray[np.float32] | None:
    """Those of the sampled tokens, each at its place."""
    if not node.logprobs:
        return None
    given = logprobs(node.logprobs, int(mask.sum()), where)
    spread = np.zeros(len(mask), np.float32)
    spread[mask] = given
    return spread


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Start and length of each run of true.

    Example:
        >>> runs(np.array([True, True, False, True]))
        [(0, 2), (3, 1)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [(int(a), int(b - a)) for a, b in list(pairwise(edges))[::2]]


def metrics_of(traces: Sequence[tuple[str, Trace]]) -> dict[str, float]:
    """Rewards, weights other than 1 and metrics of traces, each trace's under a prefix."""
    found: dict[str, float] = {}
    for prefix, trace in traces:
        for name, reward in (trace.rewards or {}).items():
            if reward is not None:
                found[f"{prefix}{name}"] = reward.score
                if reward.weight != 1:
                    found[f"{prefix}{name}.weight"] = reward.weight
        rest = {f"{prefix}{k}": v for k, v in (trace.metrics or {}).items() if v is not None}
        found |= {_free(name, found): float(value) for name, value in rest.items()}
    return found


def _free(name: str, taken: Mapping[str, float]) -> str:
    return f"{name}.metric" if name in taken else name
