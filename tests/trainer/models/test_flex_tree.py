"""The path of trees on a GPU, as far as a CPU shows it: its graphs, its padding, its gradients.

FlexAttention computes no gradients on a CPU. These tests lift its check of the device; the gradients
are then those of its reference implementation, which has no kernel.
"""

import shutil

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from tests.helpers.trainer_helpers import VOCAB
from tests.trainer.models.test_tree_attention import (
    dense,
    inputs_of,
    large_forest,
    only_forest,
    tree_of,
)
from trainer.models import tree_attention
from trainer.models.tree_attention import attend_by_blocks

NUM_BATCHES = 200
MOST_GRAPHS = 4


@pytest.fixture
def compile_with(monkeypatch):
    """Compile FlexAttention as on a GPU, except for the backend; gradients are allowed."""

    def choose(backend):
        torch._dynamo.reset()
        monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
        made = torch.compile(
            torch_flex.flex_attention, dynamic=True, fullgraph=True, backend=backend
        )
        monkeypatch.setattr(tree_attention, "compiled", lambda: made)

    yield choose
    torch._dynamo.reset()


def num_graphs():
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def small_forest(rng):
    """Two responses to one prompt: 6 to 400 tokens."""
    prompt = rng.integers(0, VOCAB, rng.integers(2, 100)).tolist()
    rows = []
    for first in (1, 2):
        response = [first, *rng.integers(0, VOCAB, rng.integers(1, 150)).tolist()]
        rows.append((prompt, response, [True] * len(response)))
    return only_forest(rows)


def expected(inputs, forest, window):
    mask = dense(forest, window)
    found = scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3, enable_gqa=True)
    return found.transpose(1, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("num_batches", [60, pytest.param(NUM_BATCHES, marks=pytest.mark.nightly)])
def test_all_shapes_with_and_without_windows_and_gradients_compile_four_graphs(
    num_batches, compile_with
):
    compile_with("aot_eager")
    before, rng = num_graphs(), np.random.default_rng(0)
    sizes = set()
    for number in range(num_batches):
        forest = large_forest(number) if number % 50 == 0 else small_forest(rng)
        window = (None, 5, 40)[number % 3]
        inputs, tree = inputs_of(forest.num_tokens), tree_of(forest)
        with torch.set_grad_enabled(number % 2 == 0):
            found = attend_by_blocks(*inputs, tree, window, scaling=0.3)
        sizes.add(forest.num_tokens)
        if number % 20 not in {0, 1}:
            continue
        other = expected(inputs, forest, window)
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)
        if number % 2 == 0:
            weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
            gradients = (torch.autograd.grad((o * weights).sum(), inputs) for o in (found, other))
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert len(sizes) > num_batches // 2
    assert num_graphs() - before == MOST_GRAPHS  # two kinds of masks, with and without gradients


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("windows", [(None,), (None, 64)])
def test_as_many_blocks_as_heads_and_whole_blocks_compile_no_further_graphs(windows, compile_with):
    """The first forest has 16 blocks for 16 heads, and inputs are views, as a model makes them."""
    compile_with("aot_eager")
    before = num_graphs()
    for num_tokens in (2048, 2000, 1024, 1000, 256, 300, 128):
        shapes = [(1, num_tokens, heads, 16) for heads in (16, 8, 8)]
        tree = torch.stack([torch.arange(num_tokens), torch.full((num_tokens,), num_tokens)])
        for window in windows:
            for has_gradient in (True, False):
                inputs = [torch.randn(s, requires_grad=True).transpose(1, 2) for s in shapes]
                with torch.set_grad_enabled(has_gradient):
                    attend_by_blocks(*inputs, tree[None, None], window)
    assert num_graphs() - before == 2 * len(windows)  # with and without gradients


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # the compiler's
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler for torch.compile on a CPU")
def test_a_compiled_kernel_computes_200_shapes_of_trees_without_compiling_again():
    torch._dynamo.reset()
    before, rng = num_graphs(), np.random.default_rng(0)
    for number in range(NUM_BATCHES):
        forest = large_forest(number) if number % 50 == 0 else small_forest(rng)
        inputs = [tensor.detach() for tensor in inputs_of(forest.num_tokens)]
        window = (None, 5, 40)[number % 3]
        with torch.no_grad():
            found = attend_by_blocks(*inputs, tree_of(forest), window, scaling=0.3)
        torch.testing.assert_close(found, expected(inputs, forest, window), rtol=1e-4, atol=1e-5)
    assert num_graphs() - before == 2  # with and without a window
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_padding_and_autocast_leave_the_result_of_a_small_forest(groups, monkeypatch):
    """In bfloat16, queries and keys come in float32, as rotary embeddings leave them."""
    monkeypatch.setattr(tree_attention, "compiled", lambda: torch_flex.flex_attention)
    forest = small_forest(np.random.default_rng(1))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, forest.num_tokens, 8) for heads in (2 * groups, 2, 2)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    tree = tree_of(forest)
    found = attend_by_blocks(query, key, value, tree, None, scaling=0.3)
    torch.testing.assert_close(found, expected((query, key, value), forest, None))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = attend_by_blocks(query, key, value.bfloat16(), tree, None, scaling=0.3)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), found, rtol=0.05, atol=0.02)


def test_dropout_is_rejected():
    forest = small_forest(np.random.default_rng(1))
    inputs = inputs_of(forest.num_tokens)
    with pytest.raises(ValueError, match="dropout"):
        attend_by_blocks(*inputs, tree_of(forest), None, dropout=0.1)
