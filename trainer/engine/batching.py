"""Decode concurrent requests as one batch: its pictures, key-value cache and sampled tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from pipelines.generation.engines.base import Picture, Sampling
from rollout_io.retokenize.processor import open_picture
from schemas.errors import EngineError, InputError, count
from trainer.batches.forest import Forest, Pictures
from trainer.batches.pictures import MOST_PREPROCESSED, PictureReader
from trainer.models.pictures import MUTUAL, picture_inputs, shows_pictures
from trainer.models.router_replay import recorded

Decode = Callable[[Sequence[int], Sampling], str]


@dataclass(eq=False, slots=True)
class Request:
    """A prompt to continue, and the response sampled so far.

    Attributes:
        prompt: [P >= 1] ids.
        sampling: Sampling settings.
        max_tokens: Maximum length of the response, limited by the model's context.
        generator: Random number generator of this request, so that its samples do not depend on the
            batch.
        is_wanted: Function that returns whether the caller is still waiting.
        pictures: Pictures that the prompt shows.
        response: Ids sampled so far.
        logprobs: Log-probability of each sampled id, nats.
        support: Ids that could have been sampled at each token; empty without truncation.
        routes: Experts of the forwarded tokens (all but the last): for each forward pass, an array
            [tokens, layers, topk] int16. Empty without supported routers.
        stop_reason: Why the response ended; None while it is being sampled.
    """

    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int
    generator: torch.Generator
    is_wanted: Callable[[], bool]
    pictures: Sequence[Picture] = ()
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[list[int]] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)
    stop_reason: str | None = None

    def take(
        self,
        token: int,
        logprob: float,
        support: list[int] | None,
        ends: Collection[int],
        decode: Decode,
    ) -> None:
        """Append a sampled token, and check whether the response ends."""
        self.response.append(token)
        self.logprobs.append(logprob)
        if support is not None:
            self.support.append(support)
        if token in ends or (self.sampling.stop and self._met_stop(decode)):
            self.stop_reason = "stop"
        elif len(self.response) >= self.max_tokens:
            self.stop_reason = "length"
        elif not self.is_wanted():
            self.stop_reason = "abort"

    def _met_stop(self, decode: Decode) -> bool:
        longest = max(map(len, self.sampling.stop))
        tail = decode(
            self.response[-4 * longest - 4 :], self.sampling
        )  # a character takes at most 4 tokens
        return any(text in tail for text in self.sampling.stop)


@torch.no_grad()
def continue_batch(
    model: Any,
    requests: Sequence[Request],
    *,
    ends: Collection[int],
    decode: Decode,
    finished: Callable[[Request], None],
    preprocess: Preprocess | None = None,
) -> None:
    """Sample the responses of a batch of requests until every request has a stop reason.

    Prompts are padded on the left; finished rows are removed from the batch.

    Args:
        model: A Transformers causal LM.
        requests: At least one request.
        ends: Ids that end a sequence.
        decode: Converts ids to text, for the stop strings of the given settings.
        finished: Called with each request when it ends.
        preprocess: Returns what the model's image processor makes of a picture; None: there are none.
    """
    ids, mask = (part.to(model.device) for part in _padded([r.prompt for r in requests]))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {} if preprocess is None else shown_inputs(model, requests, ids, mask, preprocess)
    positions = inputs.pop("position_ids", positions)
    cache = DynamicCache(config=model.config)
    # Transformers 5.24 renamed the argument, and warns about the earlier name.
    is_renamed = "cache" in inspect.signature(model.forward).parameters
    cache_argument = {"cache" if is_renamed else "past_key_values": cache}
    rows = list(requests)
    while True:
        with recorded(model) as experts:
            logits = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **cache_argument,
                **inputs,
            ).logits[:, -1]
        inputs = {}
        _keep_routes(rows, experts(), mask[:, -ids.shape[1] :].bool())
        settings, generators = [r.sampling for r in rows], [r.generator for r in rows]
        sampled = sample_tokens(logits, settings, generators)
        for row, token, logprob, support in zip(rows, *sampled, strict=True):
            row.take(token, logprob, support, ends, decode)
            if row.stop_reason is not None:
                finished(row)
        continuing = [i for i, row in enumerate(rows) if row.stop_reason is None]
        if not continuing:
            return
        if len(continuing) < len(rows):
            keep = torch.tensor(continuing, device=model.device)
            cache.batch_select_indices(keep)
            mask, positions = mask[keep], positions[..., keep, :]
            rows = [rows[i] for i in continuing]
        ids = torch.tensor([[row.response[-1]] for row in rows], device=model.device)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], -1)
        positions = next_positions(positions)


def _keep_routes(rows: Sequence[Request], routes: Tensor | None, is_real: Tensor) -> None:
    """Store the routes of each row's tokens, except padding, after a forward pass."""
    if routes is not None:
        for row, row_routes, real in zip(
            rows, routes.reshape(*is_real.shape, *routes.shape[1:]), is_real, strict=True
        ):
            row.routes.append(row_routes[real].cpu())


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pad ids on the left ([N, longest]); also return a mask with 1 for real tokens."""
    missing = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    ids = [[0] * num + list(prompt) for num, prompt in zip(missing, prompts, strict=True)]
    real = [[0] * num + [1] * len(prompt) for num, prompt in zip(missing, prompts, strict=True)]
    return torch.tensor(ids), torch.tensor(real)


def sampled_distribution(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Compute the log-probabilities of the distributions to sample from.

    p = softmax(logits / temperature), restricted by min_p, then top_k, then top_p (vLLM's order),
    and renormalised. Ties at a threshold of min_p or top_k are kept. Temperature 0 is treated as
    1 here; `sample_tokens` then takes the most likely token.

    Args:
        logits: [B, V] logits of the next token of each row.
        settings: Sampling settings of each row.

    Returns:
        [B, V] float32 nats; -inf at tokens that cannot be sampled.

    Example:
        >>> p = torch.tensor([[0.5, 0.3, 0.2]])
        >>> sampled_distribution(p.log(), [Sampling(top_k=2)]).exp().tolist()
        [[0.625, 0.375, 0.0]]
    """
    num_tokens = logits.shape[-1]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(logits.device)[:, None]

    logits = logits.float() / column([s.temperature or 1.0 for s in settings])
    if any(s.min_p > 0 for s in settings):
        least = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in settings]
        lowest = logits.amax(-1, keepdim=True) + column(least)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    top_k = [min(s.top_k or num_tokens, num_tokens) for s in settings]
    if any(k < num_tokens for k in top_k):
        limited = [k for k in top_k if k < num_tokens]
        largest = logits.topk(max(limited)).values
        last = [k - 1 if k < num_tokens else 0 for k in top_k]
        lowest = largest.gather(-1, torch.tensor(last, device=logits.device)[:, None])
        every = torch.tensor([k == num_tokens for k in top_k], device=logits.device)[:, None]
        logits = logits.masked_fill((logits < lowest) & ~every, -torch.inf)
    if any(s.top_p < 1 for s in settings):
        ordered, order = logits.log_softmax(-1).sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        top_p = column([s.top_p if s.top_p < 1 else math.inf for s in settings])
        beyond = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        logits = logits.masked_fill(beyond, -torch.inf)
    return logits.log_softmax(-1)


def sample_tokens(
    logits: Tensor, settings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> tuple[list[int], list[float], list[list[int] | None]]:
    """Sample one token for each row, with one transfer from the device.

    Each row's generator (of the CPU) draws one number u, and the token is the first whose
    cumulative probability exceeds u, so that a row's samples do not depend on the batch.

    Args:
        logits: [B, V] logits of the next token of each row.
        settings: Sampling settings of each row.
        generators: Random number generator of each row.

    Returns:
        The ids of the tokens, their log-probabilities in nats, and the ids that could have been
        sampled, None without truncation ([B] each).

    Raises:
        RuntimeError: Logits are not finite.
    """
    logprobs = sampled_distribution(logits, settings)
    draws = [float(torch.rand((), dtype=torch.float64, generator=g)) for g in generators]
    # The largest draw, 1 - 2^-53, times a sum could be rounded up to the sum.
    wanted = torch.tensor(draws, dtype=torch.float64) * (1 - 2.0**-52)
    cumulative = logprobs.double().exp().cumsum(-1)
    wanted = wanted.to(logits.device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, wanted, right=True)
    drawn = drawn.clamp(max=logits.shape[-1] - 1)  # beyond the end if logits are not finite
    greedy = torch.tensor([s.temperature == 0 for s in settings], device=logits.device)
    token = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), drawn)
    sampled = torch.cat([token.double(), logprobs.gather(-1, token).double()], -1).tolist()
    if not all(math.isfinite(logprob) for _, logprob in sampled):
        raise RuntimeError("the model's logits are not finite: its weights may have diverged")
    sets = [
        logprobs[row].isfinite().nonzero()[:, 0].tolist() if one.truncates else None
        for row, one in enumerate(settings)
    ]
    return [int(token) for token, _ in sampled], [logprob for _, logprob in sampled], sets


Preprocess = Callable[[bytes], Mapping[str, Tensor]]


def preprocessor_of(model: str) -> Preprocess:
    """Return a function that preprocesses the content of a picture for a model, and keeps the last ones.

    Raises:
        InputError: `processor`: the image processor cannot be loaded.
    """
    reader = PictureReader(model, ())

    @lru_cache(maxsize=MOST_PREPROCESSED)
    def preprocessed(content: bytes) -> Mapping[str, Tensor]:
        where = "a picture of the prompt"
        return reader.preprocess(open_picture(content, where), where)

    return preprocessed


def check_shown(model: Any, prompt: Sequence[int], pictures: Sequence[Picture]) -> None:
    """Check that a model can show pictures, and that every placeholder belongs to one of them.

    Raises:
        EngineError: `engine_pictures`: the model has no encoder of pictures.
        InputError: `picture_tokens`: a placeholder of the prompt is at no picture.
    """
    if not shows_pictures(model):
        if pictures:
            finding = f"the model ({model.config.model_type}) has no encoder of pictures"
            raise EngineError("engine_pictures", "prompt", finding)
        return
    placeholder = model.config.image_token_id
    at_pictures = [
        prompt[one.start : one.start + one.length].count(placeholder) for one in pictures
    ]
    num_outside = prompt.count(placeholder) - sum(at_pictures)
    if num_outside:
        finding = f"{count(num_outside, 'placeholder')} of pictures at no picture"
        raise InputError("picture_tokens", "prompt", finding)


def shown_inputs(
    model: Any,
    requests: Sequence[Any],
    ids: Tensor,
    is_real: Tensor,
    preprocess: Preprocess,
) -> dict[str, Any]:
    """Return the arguments of the first forward pass of a batch that depend on its pictures.

    They are computed as in training: the prompts are the chains of a forest.

    Args:
        model: The model.
        requests: [B] requests, each with its `pictures`.
        ids: [B, L] ids, padded on the left.
        is_real: [B, L] false at padding.
        preprocess: Preprocesses the content of a picture.

    Returns:
        Features, types of tokens if those of a picture see each other, and `position_ids`
        [4, B, L] if they count rows and columns (M-RoPE). Empty without pictures.
    """
    shown = [(row, one) for row, request in enumerate(requests) for one in request.pictures]
    if not shown:
        return {}
    real, none = is_real.bool(), ids.new_zeros(0)
    lengths = real.sum(1)
    row_ends = lengths.cumsum(0)
    shows = ids[real] == model.config.image_token_id
    contents, firsts, ends = list[bytes](), dict[str, int](), [0]
    nodes, features = list[Tensor](), list[Tensor]()
    for row, picture in shown:
        begin = int(row_ends[row] - lengths[row]) + picture.start
        node = begin + shows[begin : begin + picture.length].nonzero()[:, 0]
        if picture.sha256 not in firsts:
            firsts[picture.sha256] = ends[-1]
            contents.append(picture.content)
            ends.append(ends[-1] + len(node))
        nodes.append(node)
        features.append(firsts[picture.sha256] + torch.arange(len(node), device=ids.device))
    pictures = Pictures(
        node=torch.cat(nodes),
        feature=torch.cat(features),
        ends=ids.new_tensor(ends),
        load=lambda: [preprocess(content) for content in contents],
    )
    forest = Forest(
        token_ids=ids[real],
        position_ids=(is_real.cumsum(1) - 1)[real],
        subtree_end=row_ends.repeat_interleave(lengths),
        target_parent=none,
        target_token=none,
        target_slot=none,
    )
    inputs = picture_inputs(model, forest, pictures)
    if "position_ids" in inputs:
        flat = inputs["position_ids"][:, 0]
        inputs["position_ids"] = padded = flat.new_zeros(len(flat), *ids.shape)
        padded[:, real] = flat
    if model.config.model_type in MUTUAL:
        inputs["token_type_ids"] = (ids == model.config.image_token_id).long()
    return inputs


def next_positions(positions: Tensor) -> Tensor:
    """Return the positions of the tokens that follow those of a batch: one more than the largest.

    Args:
        positions: [B, L], or [4, B, L]: depth, and positions in time, rows and columns.

    Returns:
        [B, 1] or [4, B, 1].
    """
    last = positions.amax(-1, keepdim=True)
    if last.ndim == 3:
        last[1:] = last[1:].amax(0)
    return last + 1
