"""What only a GPU shows: `make test-gpu`. `tests/trainer/models/test_gpu_claims.py` runs it small on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout_io.retokenize.tokenizer import ChatTokenizer
from tests.helpers.gpu_claims import (
    Size,
    check_bfloat16,
    check_fsdp2,
    check_rl_iteration,
    compiled_difference,
    graphs_over_shapes,
    sets_difference,
)
from trainer.models import tree_attention, varlen
from trainer.models.varlen import packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("default"),  # kernels and compilers warn about the machine
]


@pytest.mark.parametrize("window", [None, 64])
def test_packed_rows_in_bfloat16_are_as_exact_as_padded_ones(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    kernel = varlen.VARLEN_ATTN
    path = packed_attention(torch.device("cuda"), "bfloat16")
    if "(varlen_attn)" not in path:
        pytest.skip(f"packed rows use {path}")

    def counted(*arguments: object, **settings: object) -> object:
        calls.append(settings["window_size"])
        return kernel(*arguments, **settings)

    monkeypatch.setattr(varlen, "VARLEN_ATTN", counted)
    num_forests = check_bfloat16("cuda", Size(), window, "step")
    assert len(calls) == Size().num_layers * num_forests
    assert (63 if window else -1) in {size for size, _ in calls}


@pytest.mark.parametrize("window", [None, 64])
def test_trees_in_bfloat16_are_as_exact_as_padded_rows(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    compiled = tree_attention.compiled
    monkeypatch.setattr(tree_attention, "compiled", lambda: calls.append(1) or compiled())
    num_forests = check_bfloat16("cuda", Size(), window, "tree")
    assert len(calls) == Size().num_layers * num_forests


def test_200_batches_of_other_shapes_compile_four_graphs_of_attention_and_two_of_the_head() -> None:
    torch._dynamo.reset()
    assert 2 <= graphs_over_shapes("cuda", Size(), 200) <= 6


@pytest.mark.parametrize("layout", ["step", "tree"])
@pytest.mark.parametrize("kind", ["dense", "lora", "experts"])
def test_compiled_layers_have_the_gradient_of_uncompiled_ones(kind: str, layout: str) -> None:
    torch._dynamo.reset()
    assert compiled_difference("cuda", Size(), kind, layout) < 1e-4


@pytest.mark.parametrize("kind", ["sampler", "teacher"])
def test_targets_with_sets_of_ids_have_the_gradient_of_a_cpu(kind: str) -> None:
    assert sets_difference("cuda", Size(), kind) < 1e-4


@pytest.mark.parametrize("compiles", [False, True])
def test_a_model_sharded_over_one_process_has_the_gradient_of_a_whole_one(
    compiles: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    check_fsdp2("cuda", Size(), compiles=compiles)


def test_rl_samples_and_trains_half_a_billion_parameters(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    check_rl_iteration(tmp_path, tokenizer, tiny=False)
    assert torch.cuda.max_memory_allocated() > 6 * 2**30  # weights, gradients, moments
