"""Norms of the gradients of all rows of a micro-batch, from one backward pass.

The gradient of a linear layer's weight is a sum over tokens t of outer products of the output's
gradient g_t and the input x_t. Its squared norm, over the tokens of one row, is therefore

    sum over t, u of (g_t . g_u) (x_t . x_u)

which needs no gradient per row (the "ghost norm", arXiv:1510.01799, extended to sequences in
arXiv:2205.00048). Rows are chains, so no token belongs to two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.batches.forest import Chains, Forest
from trainer.models.logprob_head import target_logprobs
from trainer.models.policy import Policy, hidden_before_targets
from trainer.models.router_replay import replayed

Pair = tuple[Tensor, Tensor]


class Piece(NamedTuple):
    """Range of targets of a chain within a block.

    `is_last` is None unless the chain is split into several pieces.
    """

    chain: int
    begin: int
    end: int
    is_last: bool | None = None


Block = list[Piece]


class UnsupportedLayerError(Exception):
    """Raised if a layer does not allow computing the norms of rows in one backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainSquares:
    """Squared gradient norms of a micro-batch with C chains and M targets; tensors on the CPU.

    Attributes:
        first_slots: [C] slot of each chain's first target.
        squares: [C] float64 squared norm of each chain's gradient.
        coefficients: [M] derivatives of the loss with respect to log-probability and entropy.
        logprobs: [M] log-probabilities, nats.
    """

    first_slots: Tensor
    squares: Tensor
    coefficients: Pair
    logprobs: Tensor


def check_layers(policy: Policy) -> None:
    """Check that the squared gradient norms of every layer with trained parameters can be computed.

    Raises:
        UnsupportedLayerError: A parameter is shared by layers other than embedding and head, or
            belongs to a module that contains other modules.
    """
    model: Any = policy.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    owners: dict[int, list[nn.Module]] = {}
    for name, module in policy.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own and any(True for _ in module.children()):
            raise UnsupportedLayerError(f"{name} has both parameters and submodules")
        for parameter in own:
            owners.setdefault(id(parameter), []).append(module)
    for modules in owners.values():
        if len(modules) > 1 and {id(m) for m in modules} != {id(head), id(embedding)}:
            raise UnsupportedLayerError("the model shares a parameter between layers")
    for module in (head, embedding):
        if _is_trained(module) and type(module) not in (nn.Linear, nn.Embedding):
            raise UnsupportedLayerError(f"the model has a layer of type {type(module).__name__}")


class GhostNorms:
    """Accumulates the gradient of micro-batches, and computes the norm of each chain's gradient.

    While the context is open, hooks on the layers observe the backward pass.

    Args:
        policy: The policy, checked by `check_layers`.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._head: Any = policy.model.get_output_embeddings()
        self._embedding: Any = policy.model.get_input_embeddings()
        self._handles: list[Any] = []
        self._spans: list[tuple[int, int]] = []
        self._squares = torch.zeros(0, dtype=torch.float64)
        self._counts: dict[int, int] = {}
        self._head_rows: list[Tensor] = []
        self._split: Pair | None = None
        self._is_inside = False
        self._token_ids = torch.zeros(0, dtype=torch.int64)

    def __enter__(self) -> Self:
        """Attach the hooks."""
        for module in self._policy.modules():
            own = any(p.requires_grad for p in module.parameters(recurse=False))
            if own and module is not self._head:
                self._handles.append(module.register_forward_hook(self._watch))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def backward(
        self,
        forest: Forest,
        temperature: Tensor,
        device: torch.device,
        loss: Pair | Callable[[Tensor, Tensor], Pair],
    ) -> ChainSquares:
        """Run the forward and backward pass of a micro-batch of chains.

        Args:
            forest: Chains side by side.
            temperature: [M].
            device: Device of the policy.
            loss: [M] derivatives of the loss with respect to log-probability and entropy, or a
                function that computes the derivatives from both.

        Raises:
            UnsupportedLayerError: A layer was called in a way whose norms cannot be computed.
        """
        chains = Chains.of(forest.subtree_end)
        assert chains.lengths is not None
        lengths = torch.tensor(chains.lengths)
        ends = lengths.cumsum(0)
        chain = torch.searchsorted(ends, forest.target_parent, right=True)
        num_targets = torch.bincount(chain, minlength=len(lengths))
        firsts = num_targets.cumsum(0) - num_targets
        self._spans = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
        self._squares = torch.zeros(len(lengths), dtype=torch.float64, device=device)
        self._counts.clear()
        on_device, slots = forest.to(device), forest.target_slot[firsts]
        self._token_ids = on_device.token_ids
        temperature = temperature.to(device)
        with replayed(on_device.routes):
            hidden: Any = hidden_before_targets(self._policy.model, on_device)
        blocks = list(self._blocks(num_targets.tolist()))
        inputs = hidden.detach(), on_device.target_token, temperature
        logprobs, coefficients = self._coefficients(inputs, blocks, loss)
        hidden.backward(self._head_backward(inputs, coefficients, blocks))
        return ChainSquares(
            first_slots=slots,
            squares=self._squares.cpu(),
            coefficients=(coefficients[0].cpu(), coefficients[1].cpu()),
            logprobs=logprobs.cpu(),
        )

    def _blocks(self, num_targets: list[int]) -> Iterator[Block]:
        """Group chains into blocks of targets whose logits are in memory at once.

        A chain with more targets than a block is split; it shares no block with other chains.
        """
        limit, start = self._policy.logprob_chunk_tokens, 0
        block: Block = []
        for chain, num in enumerate(num_targets):
            if block and start + num - block[0].begin > limit:
                yield block
                block = []
            end = start + num
            if num > limit:
                for begin in range(start, end, limit):
                    yield [
                        Piece(chain, begin, min(begin + limit, end), is_last=begin + limit >= end)
                    ]
            else:
                block.append(Piece(chain, start, end))
            start = end
        if block:
            yield block

    def _coefficients(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        blocks: list[Block],
        loss: Pair | Callable[[Tensor, Tensor], Pair],
    ) -> tuple[Tensor, Pair]:
        with torch.no_grad():
            parts = [
                self._outputs(*(t[block[0].begin : block[-1].end] for t in inputs))
                for block in blocks
            ]
        logprobs, entropies = (torch.cat(outputs) for outputs in zip(*parts, strict=True))
        if callable(loss):
            return logprobs, loss(logprobs, entropies)
        return logprobs, (loss[0].to(logprobs.device), loss[1].to(logprobs.device))

    def _outputs(self, hidden: Tensor, token: Tensor, temperature: Tensor) -> Pair:
        return self._of_logits(self._head(hidden), token, temperature)

    def _of_logits(self, logits: Tensor, token: Tensor, temperature: Tensor) -> Pair:
        policy = self._policy
        return target_logprobs(
            logits,
            token,
            temperature,
            scale=policy.logit_scale,
            softcap=policy.softcap,
            entropy_gradient=policy.entropy_gradient,
        )

    def _head_backward(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        coefficients: Pair,
        blocks: list[Block],
    ) -> Tensor:
        """Backpropagate through the head; return the gradient of the hidden states ([M, size])."""
        hidden, token, temperature = inputs
        found = torch.zeros_like(hidden)
        self._head_rows = []
        for block in blocks:
            part = slice(block[0].begin, block[-1].end)
            leaf = hidden[part].detach().requires_grad_()
            with torch.enable_grad():
                logits: Any = self._head(leaf)
                kept: list[Tensor] = []
                logits.register_hook(kept.append)
                outputs = self._of_logits(logits, token[part], temperature[part])
                weighted = coefficients[0][part] * outputs[0]
                if self._policy.entropy_gradient:
                    weighted = weighted + coefficients[1][part] * outputs[1]
                loss_sum: Any = weighted.sum()
                loss_sum.backward()
            assert leaf.grad is not None
            found[part] = leaf.grad
            if _is_trained(self._head):
                # The backward pass overwrites the logits with their gradient.
                for piece in block:
                    own = slice(piece.begin - part.start, piece.end - part.start)
                    self._add_head(piece, leaf.detach()[own].float(), kept[0].detach()[own].float())
        return found

    def _add_head(self, piece: Piece, hidden: Tensor, gradient: Tensor) -> None:
        """Add the squared norms of the head's gradient for one piece.

        If the head is tied to the embedding, also store its gradient at the chain's tokens.
        """
        begin, end = self._spans[piece.chain]
        token_ids = self._token_ids[begin:end]
        if piece.is_last is None:
            self._squares[piece.chain] += _linear_square(self._head, hidden, gradient)
            if self._is_tied:
                self._head_rows.append(gradient[:, token_ids].T @ hidden)
            return
        weight, bias = gradient.T @ hidden, gradient.sum(0)
        if self._split is not None:
            weight, bias = weight + self._split[0], bias + self._split[1]
        self._split = None if piece.is_last else (weight, bias)
        if piece.is_last:
            self._squares[piece.chain] += weight.double().square().sum()
            if self._head.bias is not None:
                self._squares[piece.chain] += bias.double().square().sum()
            if self._is_tied:
                self._head_rows.append(weight[token_ids])

    @property
    def _is_tied(self) -> bool:
        return _is_trained(self._head) and self._head.weight is self._embedding.weight

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of a layer that observes the gradient of the layer's output."""
        if self._is_inside or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise UnsupportedLayerError(
                f"a layer of type {type(module).__name__} takes inputs other than one tensor"
            )
        watched: Any = output
        watched.register_hook(partial(self._add, module, args[0].detach()))

    @torch.no_grad()
    def _add(self, module: nn.Module, given: Tensor, gradient: Tensor) -> None:
        """Add each chain's squared norm for a layer, from its input and its output's gradient."""
        self._counts[id(module)] = self._counts.get(id(module), 0) + 1
        if self._counts[id(module)] > 1:
            kind = type(module).__name__
            raise UnsupportedLayerError(f"a layer of type {kind} is called several times")
        num_tokens = self._spans[-1][1]
        if gradient.shape[:2] == (1, num_tokens):
            given, gradient = given[0], gradient[0]
        if len(gradient) != num_tokens or len(given) != num_tokens:
            raise UnsupportedLayerError(f"{type(module).__name__} is not applied token by token")
        self._is_inside = True  # the layer is called again below
        for chain, (begin, end) in enumerate(self._spans):
            parts = given[begin:end], gradient[begin:end].float()
            if module is self._embedding:
                square = self._embedding_square(chain, *parts)
            elif type(module) is nn.Linear:
                square = _linear_square(module, parts[0].float(), parts[1])
            else:
                square = _square(module, *parts)
            self._squares[chain] += square
        self._is_inside = False

    def _embedding_square(self, chain: int, token_ids: Tensor, gradient: Tensor) -> Tensor:
        """Compute the squared norm of a chain's gradient of the embedding.

        With a tied head, add twice the inner product with the gradient of the head.
        """
        if self._embedding.padding_idx is not None:
            gradient = gradient * (token_ids != self._embedding.padding_idx)[:, None]
        unique: Any = torch.unique
        used, index = unique(token_ids, return_inverse=True)
        summed = gradient.new_zeros(len(used), gradient.shape[-1]).index_add(0, index, gradient)
        square = summed.double().square().sum()
        if self._is_tied:
            square = square + 2 * (self._head_rows[chain].double() * gradient).sum()
        return square


def _is_trained(module: Any) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _linear_square(module: Any, given: Tensor, gradient: Tensor) -> Tensor:
    """Compute the squared norm of a linear layer's gradient.

    `given` is [n, in], the inputs; `gradient` is [n, out], the gradients of the outputs.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> inputs, gradients = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0], [4.0]])
        >>> _linear_square(layer, inputs, gradients).item()  # the gradient is [[3, 8]]
        73.0
    """
    num, (size_out, size_in) = len(given), module.weight.shape
    square = gradient.new_zeros((), dtype=torch.float64)
    if module.weight.requires_grad:
        if num * (size_in + size_out) < size_in * size_out:
            square += ((gradient @ gradient.T) * (given @ given.T)).double().sum()
        else:
            square += (gradient.T @ given).double().square().sum()
    if module.bias is not None and module.bias.requires_grad:
        square += gradient.sum(0).double().square().sum()
    return square


def _square(module: nn.Module, given: Tensor, gradient: Tensor) -> Tensor:
    """Compute the squared gradient norm of a layer with few parameters, such as a normalisation."""
    trained = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        leaves = {name: p.requires_grad_() for name, p in trained.items()}
        output = functional_call(module, leaves, (given,))
        found = torch.autograd.grad(output, list(leaves.values()), gradient.to(output.dtype))
    return torch.stack([g.double().square().sum() for g in found]).sum()
