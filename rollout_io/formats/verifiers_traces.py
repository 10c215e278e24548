"""Episodes of verifiers v1, from its evaluations and prime-rl: lines of `traces.jsonl`.

A node contains the tokens that its message adds to the context; the context of a call is a path from
the root. `mask` is true on sampled tokens, and `logprobs` covers only these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.formats.base import Conversation, Step
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.grammar import account
from rollout_io.formats.parsing.bodies import Sampling, Usage, sampling_extra
from rollout_io.formats.parsing.content import NO_JSON, Message
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import MESSAGE, openai_tools, read_messages, text_of
from rollout_io.formats.parsing.tokens import broken, logprob_array, strict_ids
from rollout_io.formats.prime_rl import Annotations, Update
from schemas.errors import InputError

_ASK = "sample with the train client of verifiers, which records the engine's tokens"


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
    tools: msgspec.Raw = NO_JSON
    token_ids: msgspec.Raw = NO_JSON
    mask: list[bool] | None = None
    logprobs: list[float] | None = None


class _Call(msgspec.Struct, gc=False):
    node: int | None = None
    finish_reason: str | None = None
    sampling: Sampling | None = None
    usage: Usage | None = None


class _Agent(msgspec.Struct, gc=False):
    name: str = "agent"
    trainable: bool = True


class _Reward(msgspec.Struct, gc=False):
    score: float
    weight: float = 1.0


class Trace(msgspec.Struct, gc=False):
    """The messages, calls and rewards of one agent in an episode."""

    id: str | None = None
    agent: _Agent = msgspec.field(default_factory=_Agent)
    nodes: list[_Node] = []
    calls: list[_Call] = []
    tools: msgspec.Raw = NO_JSON
    rewards: dict[str, _Reward | None] | None = None
    metrics: dict[str, float | bool | None] | None = None
    ok: bool = True
    is_timeout: bool = False
    stop_condition: str | None = None
    errors: list[Failure] | None = None

    @property
    def reward(self) -> float | None:
        """Sum of scores times weights; None if there is no score."""
        weighted = [r.score * r.weight for r in (self.rewards or {}).values() if r is not None]
        return sum(weighted) if weighted else None


_ANY = msgspec.json.Decoder(Any)


class Graph:
    """Message nodes of a trace with their tokens, and what prime-rl found out later, the newest last.

    Raises:
        RolloutError: `dangling_reference`: a parent is not an earlier node; `record_type`: a
            message is not an object; `lengths_align`, `token_range`: the tokens break an invariant.
            See `Annotations` for errors of `updates`.
    """

    def __init__(self, trace: Trace, where: str, updates: Sequence[Update] = ()) -> None:
        self.trace, self.where = trace, where
        self.calls = {call.node: call for call in trace.calls if call.node is not None}
        places = [self._place(i) for i in range(len(trace.nodes))]
        for i, node in enumerate(trace.nodes):
            if node.parent is not None and not 0 <= node.parent < i:
                finding = f"parent {node.parent} is not an earlier node"
                raise InputError("dangling_reference", places[i], finding)
            if not bytes(node.message).startswith(b"{"):
                raise InputError("record_type", places[i], "the message is not an object")
        nodes = list(zip(trace.nodes, places, strict=True))
        raws = [(bytes(node.token_ids), place) for node, place in nodes]
        self.tokens = [
            np.zeros(0, np.int32) if text == b"null" else strict_ids(text, "message", place)
            for text, place in raws
        ]
        self.masks = [_mask(n, t, p) for (n, p), t in zip(nodes, self.tokens, strict=True)]
        parents = {node.parent for node in trace.nodes}
        self.leaves = [i for i in range(len(trace.nodes)) if i not in parents]
        self.trained = self._trained()
        paths = [self._path(leaf) for leaf in self.leaves] if updates else []
        self.annotations, self.is_annotated = Annotations(updates, paths, self.masks), bool(updates)

    @property
    def sampled(self) -> list[int]:
        """Indices of the nodes that the model wrote."""
        nodes = self.trace.nodes
        return [i for i, n in enumerate(nodes) if n.sampled or self.masks[i].any()]

    @property
    def without_tokens(self) -> list[int]:
        """Indices of the nodes that the model wrote but that have no tokens."""
        return [i for i in self.sampled if not len(self.tokens[i])]

    def steps(self, *, failed: bool) -> Iterator[Step]:
        """Yield one step per model call; a shared node is in several prompts but sampled once.

        Calls of a failed run, which is not trained on, may lack tokens.
        """
        for index in self.sampled:
            if len(self.tokens[index]):
                yield self._step(index, failed=failed)

    def conversations(self) -> list[Conversation]:
        """Return the text of each path from the root to a leaf that has new model output.

        A node that several paths share counts as sampled only in the first path that is trained on,
        and is part of the prompt in all other paths. A context ends before an assistant message
        that the model did not sample.
        """
        log, sampled = Contexts(has_prompts=True), set(self.sampled)
        places = [self._place(i) for i in range(len(self.trace.nodes))]
        # An answer trains on the first path that has it, so paths that are trained on come first.
        for i in sorted(range(len(places)), key=lambda i: i not in self.trained):
            node, place, facts = self.trace.nodes[i], places[i], dict[str, Any]()
            account(MESSAGE, node.message, "nodes.message")
            log.follow(None if node.parent is None else places[node.parent])
            if i in sampled:
                facts = {
                    **self._facts(i),
                    "tools": self._tools(i),
                    "columns": self.annotations.columns,
                }
            log.say(
                read_messages([node.message], place), place, given=i not in sampled, facts=facts
            )
        steps = [step for step in log.steps() if isinstance(step, Conversation)]
        return sorted(steps, key=lambda step: places.index(step.source))

    def _facts(self, index: int) -> dict[str, Any]:
        """Return what the answer of a node has as a step and as the end of a conversation."""
        call = self.calls.get(index, _Call())
        sampling = call.sampling or Sampling()
        return {
            "source": self._place(index),
            "trains": self.trace.agent.trainable and index in self.trained,
            "stop_reason": call.finish_reason,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "agent": self.trace.agent.name,
        }

    def _tools(self, index: int) -> list[Message] | None:
        tools = self.trace.nodes[self._path(index)[0]].tools
        tools = self.trace.tools if bytes(tools) in {b"null", b"[]"} else tools
        return openai_tools(decode_line(_ANY, bytes(tools), self._place(index)))

    def missing(self) -> InputError:
        """Return the error for a run in which only some calls have tokens."""
        index = self.without_tokens[0]
        finding = "this model message has no `token_ids`, but other messages of the run do"
        return InputError("no_token_ids", self._place(index), finding, hint=_ASK)

    def _step(self, index: int, *, failed: bool) -> Step:
        node, place, path = self.trace.nodes[index], self._place(index), self._path(index)
        mask, tokens = self.masks[index], self.tokens[index]
        where = np.flatnonzero(mask)
        if not len(where) and not failed:
            raise broken("nonempty_response", place, "the model's message has no sampled tokens")
        start, stop = (int(where[0]), int(where[-1]) + 1) if len(where) else (len(mask),) * 2
        mask = mask[start:stop]
        call = self.calls.get(index, _Call())
        sampling = call.sampling or Sampling()
        messages = b",".join(bytes(self.trace.nodes[i].message) for i in path[:-1])
        text = text_of(decode_line(_ANY, bytes(node.message), place))
        trainer_logprobs, columns = self.annotations.of(index, start, stop)
        usage = call.usage or Usage()
        num_sampled = usage.completion_tokens or None
        return Step(
            **self._facts(index),
            prompt_token_ids=np.concatenate([*(self.tokens[i] for i in path[:-1]), tokens[:start]]),
            response_ids=tokens[start:stop],
            rollout_logprobs=_logprobs(node, mask, place),
            trainer_logprobs=trainer_logprobs,
            loss_mask=None if mask.all() else mask,
            spans=None if mask.all() else runs(mask),
            top_k=sampling.top_k,
            sampling_extra=sampling_extra(sampling),
            messages=f"[{messages.decode()}]",
            response_text=text,
            texts=(text,) if text else (),
            num_counted=(usage.prompt_tokens or None, num_sampled if mask.all() else None),
            columns=columns,
        )

    def _trained(self) -> set[int]:
        """Return the nodes to train on: all branches except abandoned attempts at a compaction."""
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

    def _place(self, index: int) -> str:
        return f"{self.where}.nodes[{index}]"


def _mask(node: _Node, tokens: npt.NDArray[np.int32], where: str) -> npt.NDArray[np.bool_]:
    mask = np.array(node.mask or [], np.bool_)
    if len(mask) != len(tokens):
        finding, expected = f"a mask of length {len(mask)}", f"{len(tokens)}, one per token"
        raise broken("lengths_align", where, finding, expected)
    return mask


def _logprobs(
    node: _Node, mask: npt.NDArray[np.bool_], where: str
) -> npt.NDArray[np.float32] | None:
    """Return one log-probability per token, 0 for tokens that were not sampled."""
    if not node.logprobs:
        return None
    logprobs = logprob_array(node.logprobs, int(mask.sum()), where)
    spread = np.zeros(len(mask), np.float32)
    spread[mask] = logprobs
    return spread


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return start and length of each run of true values.

    Example:
        >>> runs(np.array([True, True, False, True]))
        [(0, 2), (3, 1)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [(int(a), int(b - a)) for a, b in list(pairwise(edges))[::2]]


def metrics_of(traces: Sequence[tuple[str, Trace]]) -> dict[str, float]:
    """Return the metrics and rewards of traces, and weights other than 1, by prefixed name."""
    metrics: dict[str, float] = {}
    for prefix, trace in traces:
        for name, reward in (trace.rewards or {}).items():
            if reward is not None:
                metrics[f"{prefix}{name}"] = reward.score
                if reward.weight != 1:
                    metrics[f"{prefix}{name}.weight"] = reward.weight
        rest = {f"{prefix}{k}": v for k, v in (trace.metrics or {}).items() if v is not None}
        repeated = rest.keys() & metrics.keys()
        for name, value in rest.items():
            metrics[f"{name}.metric" if name in repeated else name] = float(value)
    return metrics
