"""Check on a few tokens that a policy reproduces the model from which it was loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import InputError
from trainer.batches.forest import Forest, Pictures
from trainer.models.pictures import num_features
from trainer.models.router_replay import recorded

WINDOW = 4
"""Size of sliding windows during the check; small enough that the checked rows exceed it."""
ROWS = (
    tuple(range(11)),
    (*range(5), 11, 12, 13, 14),
    (*range(5), 11, 12, 15, 16, 17),
)
"""Three rows that share tokens: a fork, and a fork below it. Tokens are numbered depth first."""
BEFORE = 2
"""Tokens before the picture of the rows that show one."""
SUPPORTED = "train a decoder with full or sliding-window attention and a linear head"
TOLERANCE = 1e-3
"""Tolerated difference, nats. Rounding in float32 causes less than a tenth of this."""


@torch.no_grad()
def check_policy(policy: nn.Module, path: str, *, trees: bool = False) -> None:
    """Compare log-probabilities of a few rows with the results of the model's eager forward pass.

    Even in unknown architectures, this detects a head whose logits differ from the model's, rows
    that attend to each other, misplaced windows, wrong weights of replayed experts, and forward
    passes in which a long row affects the others. Branching trees are checked only with `trees`.

    Raises:
        InputError: `model_layers`: the log-probabilities differ.
    """
    model: Any = policy.model
    with _errors_of(path), _small_windows(model):
        tokens = _tokens(model)
        plain = [_plain_forward(model, tokens[list(row)]) for row in ROWS]
        routes = [routes for _, routes in plain if routes is not None]
        forests = _forests(model, tokens, routes, trees=trees)
        _compare(policy, path, forests, [logprobs for logprobs, _ in plain])


@torch.no_grad()
def check_pictures(
    policy: nn.Module, path: str, inputs: Mapping[str, Tensor], *, trees: bool = False
) -> None:
    """Compare log-probabilities of rows that show a picture with the model's eager forward pass.

    In unknown architectures, this detects wrong places of the picture's features, wrong positions
    after it, and tokens of the picture that should see each other.

    Args:
        policy: The policy.
        path: Model directory, for messages.
        inputs: A picture, as the image processor prepares it.
        trees: Whether to check a branching tree as well.

    Raises:
        InputError: `model_layers`: the log-probabilities differ.
    """
    model: Any = policy.model
    with _errors_of(path), _small_windows(model):
        size, placeholder = num_features(model, inputs), model.config.image_token_id
        tokens = _tokens(model)
        tokens = torch.where(tokens == placeholder, tokens - 1, tokens)
        tokens = torch.cat(
            [tokens[:BEFORE], tokens.new_full((size,), placeholder), tokens[BEFORE:]]
        )
        picture = range(BEFORE, BEFORE + size)
        rows = [(*row[:BEFORE], *picture, *(n + size for n in row[BEFORE:])) for row in ROWS]
        forests = {
            f"{name} with a picture": replace(
                forest,
                pictures=Pictures(
                    node=(node := (forest.token_ids == placeholder).nonzero()[:, 0]),
                    feature=torch.arange(len(node), device=node.device) % size,
                    ends=torch.tensor([0, size], device=node.device),
                    load=lambda: [inputs],
                ),
            )
            for name, forest in _layouts(tokens, rows, trees=trees).items()
        }
        plain = [_plain_forward(model, tokens[list(row)], inputs)[0] for row in rows]
        _compare(policy, path, forests, plain)


def _compare(
    policy: nn.Module, path: str, forests: Mapping[str, Forest], plain: Sequence[Tensor]
) -> None:
    expected = torch.cat(list(plain))
    for name, forest in forests.items():
        # Without the autocast of a policy that is prepared for training.
        outputs = type(policy).forward(
            policy, forest, torch.ones(forest.num_targets, device=expected.device)
        )
        difference = float((outputs[0] - expected[: len(outputs[0])]).abs().max())
        if not difference < TOLERANCE:
            raise _differs(path, name, difference)


@contextmanager
def _errors_of(path: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        finding = f"the forward pass raised {type(error).__name__}: {error}"
        raise InputError("model_layers", path, finding, hint=SUPPORTED) from error


def _differs(path: str, name: str, difference: float) -> InputError:
    finding = f"log-probabilities of {name} differ by {difference:.2g} nats from the model's eager"
    packs_chains = "pass --set batch.sequence_layout=merge, which packs only chains"
    hint = packs_chains if name.startswith("a branching tree") else SUPPORTED
    return InputError("model_layers", path, f"{finding} forward pass", hint=hint)


@contextmanager
def _small_windows(model: Any) -> Iterator[None]:
    """Shrink every sliding window of a model, in its configurations and its layers."""
    modules = list(model.modules())
    holders = {id(h): h for m in modules for h in (m, getattr(m, "config", None)) if h is not None}
    before = {
        number: holder.sliding_window
        for number, holder in holders.items()
        if isinstance(getattr(holder, "sliding_window", None), int)
    }
    for number, window in before.items():
        holders[number].sliding_window = min(window, WINDOW)
    try:
        yield
    finally:
        for number, window in before.items():
            holders[number].sliding_window = window


def probe(model: Any) -> Forest:
    """Build packed rows of a few tokens that every vocabulary has."""
    tokens = _tokens(model)
    return _forests(model, tokens, (), trees=False)["packed rows"]


def _tokens(model: Any) -> Tensor:
    """Return a token id for each number in `ROWS`; all have an input and an output embedding."""
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    numbers = torch.arange(1, 2 + max(map(max, ROWS)), device=ends[0].device)
    return numbers * 7919 % min(map(len, ends))


def _plain_forward(
    model: Any, tokens: Tensor, picture: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of all tokens of a row except the first, and the row's routes.

    Their shapes are [n - 1] and [n, layers, topk]. The row may show a prepared picture.
    """
    inputs = dict(picture)
    if picture:
        shows = (tokens[None] == model.config.image_token_id).long()
        inputs |= dict.fromkeys(("token_type_ids", "mm_token_type_ids"), shows)
    accepted = signature(model.forward).parameters
    inputs = {name: inputs[name].to(tokens.device) for name in inputs if name in accepted}
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with recorded(model) as routes:
            logits = model(input_ids=tokens[None], use_cache=False, **inputs).logits[0, :-1]
    finally:
        model.set_attn_implementation(usual)
    logprobs: Tensor = logits.float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logprobs, routes()


def _forests(
    model: Any, tokens: Tensor, routes: Sequence[Tensor], *, trees: bool
) -> dict[str, Forest]:
    """Build the forests to check, by name: for example packed rows, replayed routes or a tree.

    In each forest, the targets of the first row come first.
    """
    forests = _layouts(tokens, ROWS, trees=trees)
    if routes:
        replays = replace(forests["packed rows"], routes=torch.cat(list(routes)))
        forests["packed rows that replay their routing"] = replays
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest:
        forests["rows packed with a long row"] = _with_position(forests["packed rows"], longest - 1)
    return forests


def _layouts(tokens: Tensor, rows: Sequence[Sequence[int]], *, trees: bool) -> dict[str, Forest]:
    ends = [sum(map(len, rows[:n])) for n in range(len(rows) + 1)]
    chains = [range(start, end) for start, end in pairwise(ends)]
    packed = tokens[[number for row in rows for number in row]]
    forests = {"a single row": _forest(tokens, rows[:1]), "packed rows": _forest(packed, chains)}
    return forests | ({"a branching tree": _forest(tokens, rows)} if trees else {})


def _forest(tokens: Tensor, rows: Sequence[Sequence[int]]) -> Forest:
    """Build a forest from rows of indices into `tokens`; rows may share indices.

    All tokens of a row except the first are targets.
    """
    size = 1 + max(map(max, rows))
    depth, end = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    for row in rows:
        at = torch.tensor(row)
        depth[at], end[at] = torch.arange(len(row)), end[at].clamp(min=row[-1] + 1)
    parents = torch.tensor([number for row in rows for number in row[:-1]])
    targets = torch.tensor([number for row in rows for number in row[1:]])
    return Forest(
        token_ids=tokens[:size],
        position_ids=depth,
        subtree_end=end,
        target_parent=parents,
        target_token=tokens[targets],
        target_slot=torch.arange(len(parents)),
    ).to(tokens.device)


def _with_position(forest: Forest, position: int) -> Forest:
    """Append a token at the given position, as if the forest had another, long row."""
    last, end = torch.tensor([position]), torch.tensor([forest.num_tokens + 1])
    return replace(
        forest,
        token_ids=torch.cat([forest.token_ids, forest.token_ids[:1]]),
        position_ids=torch.cat([forest.position_ids, last.to(forest.position_ids)]),
        subtree_end=torch.cat([forest.subtree_end, end.to(forest.subtree_end)]),
    )
