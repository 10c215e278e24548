"""What is compiled on a GPU, as far as a CPU shows it: results, graphs, kernels, bytes."""

import dataclasses
import shutil

import pytest
import torch
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.gpu_claims import (
    TINY,
    compiled_difference,
    logprobs_of,
    policy_of,
    policy_of_kind,
    turns,
)
from tests.helpers.trainer_helpers import Layerless
from tests.helpers.tree_helpers import batch_of, mini_batch_of
from trainer.config.sections import ModelConfig
from trainer.config.train_config import default_dtype
from trainer.models import attention, logprob_head, varlen
from trainer.models.layers import compile_layers
from trainer.models.varlen import packed_attention
from trainer.run.open_run import compiles

pytestmark = pytest.mark.filterwarnings("default")  # the compiler's


@pytest.fixture(autouse=True)
def compile_eagerly(monkeypatch):
    """Compile everything but the kernels."""
    torch._dynamo.reset()
    usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: usual(f, **how, backend="aot_eager"))
    logprob_head._compiled.cache_clear()
    yield
    logprob_head._compiled.cache_clear()
    torch._dynamo.reset()
    attention.AttentionInterface.register(attention.CHAIN_ATTENTION, attention.chain_attention)


def num_graphs():
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradient_with_one_set_of_graphs_for_all_shapes():
    size = dataclasses.replace(TINY, num_layers=3)
    policies = [policy_of(size, "cpu"), policy_of(size, "cpu")]
    compile_layers(policies[1].model, recomputes=True)
    before, graphs = num_graphs(), []
    for number in range(6):
        shape = dataclasses.replace(size, num_turns=1 + number % 3)
        batch = batch_of(turns(shape, number))
        for layout in ("step", "tree"):
            forests = mini_batch_of(batch, sequence_layout=layout).forests
            found = []
            for policy in policies:
                policy.zero_grad()
                logprobs = logprobs_of(policy, forests, "cpu")
                logprobs.sum().backward()
                with torch.no_grad():
                    logprobs_of(policy, forests, "cpu")
                found.append((logprobs, [p.grad for p in policy.parameters()]))
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
            graphs.append(num_graphs() - before)
    assert graphs == [2] * len(
        graphs
    )  # 2 with a gradient and 2 without, before and after attention


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["step", "tree"])
@pytest.mark.parametrize("kind", ["lora", "experts"])
def test_compiled_layers_with_adapters_or_experts_give_the_same_gradient(kind, layout):
    assert compiled_difference("cpu", TINY, kind, layout) < 1e-4


@pytest.mark.slow
def test_layers_that_are_recomputed_keep_the_output_of_attention(monkeypatch):
    forward = []
    plain = attention._attend

    def counted(*inputs, **settings):
        forward.append(not torch.is_grad_enabled())  # the backward pass differentiates it
        return plain(*inputs, **settings)

    monkeypatch.setattr(attention, "_attend", counted)
    policy = policy_of(TINY, "cpu")
    compile_layers(policy.model, recomputes=True)
    forests = mini_batch_of(batch_of(turns(TINY, 0))).forests
    logprobs_of(policy, forests, "cpu").sum().backward()
    assert forward.count(True) == TINY.num_layers * len(forests)
    assert forward.count(False) == TINY.num_layers * len(forests)


@pytest.mark.slow
def test_compiled_layers_replay_experts_with_one_graph():
    policies = [policy_of_kind(TINY, "cpu", "experts") for _ in range(2)]
    compile_layers(policies[1].model, recomputes=True)
    before, graphs = num_graphs(), []
    for number in range(3):
        (forest,) = mini_batch_of(batch_of(turns(TINY, number))).forests
        experts = torch.stack([torch.tensor([3, number % 3])] * TINY.num_layers)
        routes = experts.expand(forest.num_tokens, -1, -1).to(torch.int16)
        found = []
        for policy in policies:
            policy.zero_grad()
            forest = dataclasses.replace(forest, routes=routes)
            policy(forest, torch.ones(forest.num_targets))[0].sum().backward()
            found.append([p.grad for p in policy.parameters()])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        graphs.append(num_graphs() - before)
    assert graphs == [1, 1, 1]


def test_layers_are_compiled_by_default_on_a_gpu_if_the_model_has_any(monkeypatch):
    policy = policy_of(TINY, "cpu")
    wanted = {None: False, True: True, False: False}
    assert {c: compiles(ModelConfig(compile_layers=c), policy) for c in wanted} == wanted
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compiles(ModelConfig(), policy)
    assert not compiles(ModelConfig(compile_layers=False), policy)
    monkeypatch.setattr(policy, "model", Layerless())
    assert not compiles(ModelConfig(), policy)


class Traffic(TorchDispatchMode):
    """Counts operations on tensors of at least [rows, vocabulary], and the bytes they move."""

    def __init__(self, num_elements):
        super().__init__()
        self.num_elements, self.num_launches, self.num_bytes = num_elements, 0, 0

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, found))
        large = [
            t for t in leaves if isinstance(t, torch.Tensor) and t.numel() >= self.num_elements
        ]
        if large and not func.is_view:
            self.num_launches += 1
            self.num_bytes += sum(t.numel() * t.element_size() for t in large)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_compiled_head_has_the_gradient_of_the_plain_one(
    softcap,
    entropy_gradient,
    monkeypatch,
):
    start = (3 * torch.randn(20, 64, generator=torch.Generator().manual_seed(0))).bfloat16()

    def results():
        logits = start.clone().requires_grad_()
        settings = {"softcap": softcap, "entropy_gradient": entropy_gradient}
        logprobs, entropy = logprob_head.target_logprobs(
            logits * 1, torch.arange(20), torch.full((20,), 0.7), scale=0.5, **settings
        )
        total = logprobs * torch.linspace(-1, 1, 20)
        (total + entropy if entropy_gradient else total).sum().backward()
        assert logits.grad is not None
        return [logprobs, entropy, logits.grad]

    plain = results()
    monkeypatch.setattr(logprob_head, "is_gpu", lambda _: True)
    torch.testing.assert_close(results(), plain, rtol=2e-3, atol=1e-4)


@pytest.mark.slow
def test_chunks_of_all_sizes_share_two_graphs_of_the_head(monkeypatch):
    monkeypatch.setattr(logprob_head, "is_gpu", lambda _: True)
    before = num_graphs()
    for number in range(8):
        forests = mini_batch_of(batch_of(turns(TINY, number))).forests
        policy = policy_of(TINY, "cpu")
        logprobs_of(policy, forests, "cpu").sum().backward()
        with torch.no_grad():
            logprobs_of(policy, forests, "cpu")
    assert num_graphs() - before == 2


def test_the_precision_follows_the_device(monkeypatch):
    assert default_dtype() == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_dtype() == "bfloat16"


def test_the_attention_of_packed_rows_is_named_with_the_reason_if_it_is_slow(monkeypatch):
    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert packed_attention(card, "bfloat16").startswith("FlashAttention 2 (varlen_attn)")
    assert packed_attention(card, "float32").endswith("does not support float32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert packed_attention(card, "bfloat16").endswith("needs compute capability 8.0")
    monkeypatch.setattr(varlen, "VARLEN_ATTN", None)
    assert packed_attention(card, "bfloat16").endswith("has no varlen_attn with windows")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler for torch.compile on a CPU")
def test_the_compiled_head_moves_a_fifth_of_the_bytes_in_a_fifth_of_the_launches(
    monkeypatch, caplog
):
    """Inductor's own counts against the operations of the plain functions on blocks of rows."""
    num_rows, vocab = 1024, 4096
    logits = torch.zeros(num_rows, vocab, dtype=torch.bfloat16)
    columns = torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows)

    def both():
        leaf = logits.clone().requires_grad_()
        logprob_head.target_logprobs(leaf * 1, *columns)[0].sum().backward()

    rows_at_once = 85  # of a vocabulary of 49,152
    monkeypatch.setattr(logprob_head, "BLOCK_ELEMENTS", rows_at_once * vocab)
    with Traffic(num_rows % rows_at_once * vocab) as plain:
        both()
    monkeypatch.setattr(logprob_head, "is_gpu", lambda _: True)
    compiled = torch._dynamo.optimize("inductor", dynamic=True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled(function))
    caplog.set_level("INFO", "torch._inductor.compile_fx")  # without it, bytes are not counted
    metrics.reset()
    both()
    assert metrics.num_bytes_accessed > 0
    # What the plain functions do to all logits outside, such as the product by 1, is in neither.
    assert plain.num_launches >= 5 * metrics.generated_kernel_count
    assert plain.num_bytes >= 5 * metrics.num_bytes_accessed
