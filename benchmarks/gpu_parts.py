"""Parts of `benchmarks.gpu` that look inside an update: kernels, attention, head, engine."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks import training
from benchmarks.gpu_setup import (
    Figures,
    Lines,
    Update,
    attempted,
    model_directory,
    opened,
    rows_of,
    seconds_of,
    update_of,
    wait,
)
from pipelines.generation.engines.base import Sampling
from trainer.batches.forest import ChainLayout
from trainer.engine.embedded import TransformersEngine
from trainer.models import attention, varlen
from trainer.models.logprob_head import target_logprobs
from trainer.models.tree_attention import block_mask, tree_attention

LAYOUTS = {"packed": "step", "tree": "tree_per_group"}
KINDS = {
    "attention": ("flash", "fmha", "flex_attention", "triton_tem", "cudnn"),
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "splitk", "xmma", "::mm"),
    "copies": ("memcpy", "memset", "copy", "catarray", "::cat"),
    "optimizer": ("adam", "multi_tensor"),
    "compiled": ("triton", "graph_"),
    "elementwise": ("elementwise", "vectorized", "unrolled", "reduce", "softmax"),
}
"""Parts of the names of kernels, by kind; the first that fits counts."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::_local_scalar_dense")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def ceilings(arguments: argparse.Namespace) -> Lines:
    """Measure what the card copies and multiplies at best."""
    size = 1 << 8 if arguments.tiny else 1 << 13

    def both() -> Figures:
        a = torch.randn(size, 8 * size, device=arguments.device)
        b, c = torch.empty_like(a), a[:, :size].bfloat16().contiguous()
        copied = 2 * a.numel() * 4 / seconds_of(lambda: b.copy_(a))
        multiplied = 2 * size**3 / seconds_of(lambda: c @ c)
        return {"copy_tb_per_s": copied / 1e12, "bf16_tflops": multiplied / 1e12}

    yield attempted("ceilings", both)


def profile(arguments: argparse.Namespace) -> Lines:
    """Measure the kernels of one update by kind, and how long the card waits."""
    with opened(arguments, compiles=not arguments.tiny) as setup:
        batch = rows_of(setup.arguments)
        for name, layout in LAYOUTS.items():
            update = update_of(setup, batch, layout, arguments.tokens)
            yield attempted(name, partial(_kernels, update))


def _kernels(update: Update) -> Figures:
    seconds = seconds_of(update, rounds=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as watched:
        update()
        wait()
    device = "CUDA" if torch.cuda.is_available() else "CPU"
    events: Any = watched.profiler.kineto_results.events()
    calls = Counter(event.name() for event in events)
    ran = sorted(
        (event.start_ns(), event.duration_ns(), event.name())
        for event in events
        if str(event.device_type()).endswith(device) and not event.is_user_annotation()
    )
    busy, end, kinds, names = 0, 0, defaultdict[str, float](float), Counter[str]()
    for start, lasts, name in ran:
        busy += max(0, start + lasts - max(start, end))
        end = max(end, start + lasts)
        kinds[kind_of(name)] += lasts / 1e6
        names[name[:90]] += lasts
    return {
        "tokens": update.mini_batch.forests[0].num_tokens,
        "micro_batches": len(update.mini_batch.forests),
        "seconds": seconds,
        "idle_share": 1 - busy / 1e9 / seconds,
        "kernels": len(ran),
        "launches": sum(calls[name] for name in LAUNCHES),
        "waits": {name: calls[name] for name in WAITS if calls[name]},
        "ms_by_kind": {k: round(ms, 2) for k, ms in sorted(kinds.items(), key=lambda i: -i[1])},
        "ms_by_kernel": {name: round(ns / 1e6, 2) for name, ns in names.most_common(12)},
    }


def kind_of(kernel: str) -> str:
    """Name the kind of a kernel.

    Example:
        >>> kind_of("nvjet_tst_128x256_64x4"), kind_of("triton_red_fused_mul_3"), kind_of("x")
        ('matrix products', 'compiled', 'other')
    """
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(p in name for p in parts)), "other")


def micro(arguments: argparse.Namespace) -> Lines:
    """Measure the same update with small and large micro-batches, and without recomputation."""
    sizes = (arguments.tokens,) if arguments.tiny else (2048, 8192, 32_768, 65_536)
    for recomputes in (True, False):
        with opened(arguments, compiles=not arguments.tiny, recomputes=recomputes) as setup:
            batch = rows_of(setup.arguments)
            for name, layout in LAYOUTS.items():
                for tokens in sizes if recomputes else sizes[:2][-1:]:
                    update = update_of(setup, batch, layout, tokens)
                    kind = f"{name}, {tokens} tokens{'' if recomputes else ', all kept'}"
                    yield attempted(kind, partial(_sized, update))


def _sized(update: Update) -> Figures:
    training._bytes(reset=True)
    seconds, batch = seconds_of(update, rounds=1), update.batch
    num_tokens = int((batch.prompts.lengths + batch.responses.lengths).sum())
    return {
        "micro_batches": len(update.mini_batch.forests),
        "tokens_per_s": num_tokens / seconds,
        "peak_gib": training._bytes(reset=False) / 2**30,
    }


def kernels_of_attention(arguments: argparse.Namespace) -> Lines:
    """Measure each kernel of attention alone, with gradients and their difference to SDPA's."""
    heads, key_heads, size = (4, 2, 16) if arguments.tiny else (16, 8, 128)
    rows = ([40, 24],) if arguments.tiny else ([1024] * 32, [4096] * 8, [32_768])
    for lengths in rows:
        num, generator = sum(lengths), torch.Generator().manual_seed(0)
        shapes = [(1, num, h, size) for h in (heads, key_heads, key_heads, heads)]
        *leaves, weight = (
            torch.randn(s, generator=generator).to(arguments.device, torch.bfloat16) for s in shapes
        )
        ends = torch.tensor([0, *lengths], device=arguments.device).cumsum(0).int()
        chains = ChainLayout(lengths=list(lengths), ends=ends, longest=max(lengths))
        expected: list[Tensor] = []
        for name, attend in _attentions(chains, arguments.device).items():
            measured = partial(_attended, attend, leaves, weight, lengths, expected)
            yield attempted(f"{name}, {len(lengths)} rows of {lengths[0]}", measured)


def _attentions(chains: ChainLayout, device: str) -> dict[str, Callable[..., Tensor]]:
    """Return the kernels that can attend within packed rows, by name."""
    position = torch.cat([torch.arange(n) for n in chains.lengths or []])
    end = torch.repeat_interleave(chains.ends[1:], chains.ends.diff())
    tree = torch.stack([position.to(device), end.long()])[None, None]

    kernels: dict[str, Callable[..., Tensor]] = {
        "SDPA per row": lambda *qkv: attention._attend(*qkv, tree, chains.lengths, None, 0.0, None),
        "tree": lambda *qkv: tree_attention(*qkv, tree, None),
    }
    if device == "cuda":
        name = varlen.packed_attention(torch.device(device), "bfloat16").partition(",")[0]
        kernels[name] = lambda *qkv: varlen.varlen(*qkv, chains, None, None)
        kernels["cuDNN, ragged rows"] = lambda *qkv: RaggedCudnn.apply(*qkv, chains)
        block_mask.cache_clear()
    return kernels


def _attended(
    attend: Callable[..., Tensor],
    leaves: list[Tensor],
    weight: Tensor,
    lengths: list[int],
    expected: list[Tensor],
) -> Figures:
    inputs = [leaf.detach().requires_grad_() for leaf in leaves]
    states = [tensor.transpose(1, 2) for tensor in inputs]

    def both() -> None:
        for tensor in inputs:
            tensor.grad = None
        (attend(*states) * weight).sum().backward()

    start = time.perf_counter()
    both()
    wait()
    first = time.perf_counter() - start
    forward, whole = seconds_of(lambda: attend(*states)), seconds_of(both)
    gradient = torch.cat([t.grad.flatten().float() for t in inputs if t.grad is not None])
    expected or expected.append(gradient)
    flops = 4.0 * weight.shape[2] * weight.shape[3] * sum(n * (n + 1) // 2 for n in lengths)
    return {
        "first_seconds": first,
        "forward_ms": forward * 1e3,
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / max(whole - forward, 1e-9) / 1e12,
        "difference": float((gradient - expected[0]).norm() / expected[0].norm()),
    }


class RaggedCudnn(torch.autograd.Function):
    """cuDNN's attention over packed rows; keys are repeated for the heads that share them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, chains: ChainLayout) -> Tensor:
        """Attend; see `torch.nn.attention.varlen` for the arguments of the operation."""
        ctx.groups = query.shape[1] // key.shape[1]
        repeated = (query, *(t.repeat_interleave(ctx.groups, 1) for t in (key, value)))
        packed = [tensor[0].transpose(0, 1).contiguous() for tensor in repeated]
        ctx.rows = chains.ends, chains.ends, chains.longest, chains.longest
        settings = None, *ctx.rows, True, 0.0, True, False
        outputs = torch.ops.aten._cudnn_attention_forward(*packed, *settings)
        ctx.save_for_backward(*packed, outputs[0], outputs[1], outputs[6], outputs[7])
        return outputs[0][None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of query, key and value."""
        *inputs, seed, offset = ctx.saved_tensors
        rows = seed, offset, None, *ctx.rows, 0.0, True
        found = torch.ops.aten._cudnn_attention_backward(gradient[0].contiguous(), *inputs, *rows)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in found)
        key, value = (t.unflatten(1, (-1, ctx.groups)).sum(2) for t in (key, value))
        return query, key, value, None


def head(arguments: argparse.Namespace) -> Lines:
    """Measure log-probabilities and their gradient: ours by chunk, and TRL's kernel."""
    num, width = (64, 16) if arguments.tiny else (8192, 1024)
    for vocabulary in (512,) if arguments.tiny else (49_152, 151_936):
        torch.manual_seed(0)
        weight = (torch.randn(vocabulary, width, device=arguments.device) * 0.02).requires_grad_()
        hidden = torch.randn(num, width, device=arguments.device, requires_grad=True)
        token = torch.randint(0, vocabulary, (num,), device=arguments.device)
        heads = {f"ours, chunks of {num // n}": partial(_ours, parts=n) for n in (8, 2, 1)}
        for name, compute in (heads | {"trl": _trl}).items():
            measured = partial(_both, compute, hidden, weight, token)
            yield attempted(f"{name}, vocabulary {vocabulary}", measured)


def _ours(hidden: Tensor, weight: Tensor, token: Tensor, *, parts: int) -> Tensor:
    def one(states: Tensor, ids: Tensor) -> Tensor:
        temperature = torch.ones(len(ids), device=ids.device)
        return target_logprobs(functional.linear(states, weight), ids, temperature)[0]

    pieces = list(zip(hidden.tensor_split(parts), token.tensor_split(parts), strict=True))
    again: Any = [checkpoint(one, *piece, use_reentrant=False) for piece in pieces[:-1]]
    return torch.cat([*again, one(*pieces[-1])])


def _trl(hidden: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    settings = None, token, 1.0, 8192, None, 1.0, ("entropy",)
    return ChunkedLogProbFunction.apply(hidden, weight, *settings)[0]


def _both(compute: Callable[..., Tensor], hidden: Tensor, weight: Tensor, token: Tensor) -> Figures:
    def both() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(hidden.device.type, torch.bfloat16):
            output = compute(hidden, weight, token)
        output.sum().backward()

    return {"ms": seconds_of(both) * 1e3}


def engine(arguments: argparse.Namespace) -> Lines:
    """Measure the embedded engine's tokens per second."""
    num_tokens = 4 if arguments.tiny else 64
    how = {"dtype": getattr(torch, arguments.dtype), "device": arguments.device}
    with model_directory(arguments) as model:
        ours = TransformersEngine.load(model, max_batch_size=256, **how)
    for num_calls in (4,) if arguments.tiny else (1, 32, 128):
        yield attempted(f"{num_calls} calls", partial(_sampled, ours, num_calls, num_tokens))


def _sampled(ours: Any, num_calls: int, num_tokens: int) -> Figures:
    async def calls() -> Any:
        prompts = ([1 + n % 100, *range(5, 68)] for n in range(num_calls))
        async with ours as engine:
            sampling = Sampling(max_tokens=num_tokens)
            return await asyncio.gather(*(engine.sample(p, sampling) for p in prompts))

    seconds = seconds_of(lambda: asyncio.run(calls()), rounds=1)
    return {"tokens_per_s": num_calls * num_tokens / seconds}
