"""The claims of `tests/gpu` on a CPU, with tiny models; and a training step on a GPU's path, shapes only."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config, Qwen3Config

from benchmarks import gpu, training
from benchmarks.gpu_setup import opened, rows_of
from tests.conftest import ROOT
from tests.helpers.gpu_claims import (
    TINY,
    check_bfloat16,
    check_fsdp2,
    check_rl_iteration,
    graphs_over_shapes,
    sets_difference,
)
from trainer.batches.forest import ChainLayout, Forest
from trainer.models import attention, tree_attention, varlen
from trainer.models.policy import Policy

MODELS = {
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "Qwen3-1.7B": Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["step", "tree"])
@pytest.mark.parametrize("window", [None, 9])
def test_bfloat16_is_as_exact_as_in_padded_rows(layout, window, monkeypatch):
    calls = []
    attend = attention.chain_attention

    def counted(*arguments, **settings):
        calls.append(1)
        return attend(*arguments, **settings)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.CHAIN_ATTENTION, counted)
    num_forests = check_bfloat16("cpu", TINY, window, layout)
    assert len(calls) == TINY.num_layers * num_forests


@pytest.mark.parametrize("kind", ["sampler", "teacher"])
def test_targets_with_sets_of_ids_have_the_gradient_of_a_cpu(kind):
    assert sets_difference("cpu", TINY, kind) == 0


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_a_model_sharded_over_one_process_has_the_gradient_of_a_whole_one(
    compiles,
):
    check_fsdp2("cpu", TINY, compiles=compiles)


@pytest.mark.slow
def test_batches_of_other_shapes_compile_nothing_on_a_cpu():
    assert graphs_over_shapes("cpu", TINY, 20) == 0


@pytest.mark.slow
def test_rl_samples_and_trains_a_model_built_from_configuration(tmp_path, tokenizer):
    check_rl_iteration(tmp_path, tokenizer, tiny=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Qwen2.5-0.5B", "step"),
        ("Qwen3-1.7B", "tree"),
        pytest.param("Qwen2.5-0.5B", "tree", marks=pytest.mark.nightly),
        pytest.param("Qwen3-1.7B", "step", marks=pytest.mark.nightly),
    ],
)
def test_a_bfloat16_step_of_the_kernels_for_gpus_has_the_right_shapes_and_dtypes(
    name, layout, monkeypatch
):
    """Fake tensors have shapes and dtypes, but no values, so a model of any size fits."""
    seen = []
    kernel, config = varlen.VARLEN_ATTN, copy.deepcopy(MODELS[name])
    config.num_hidden_layers = 2  # of 24 and 28 alike ones
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads

    def counted(query, key, value, *rest, **settings):
        seen.append([(tuple(t.shape), t.dtype) for t in (query, key, value)])
        return kernel(query, key, value, *rest, **settings)

    def flex(query, key, value, *, block_mask, scale, **_):
        seen.append([(tuple(t.shape), t.dtype) for t in (query, key, value)])
        options = {"OUTPUT_LOGSUMEXP": True, "BACKEND": "AUTO"}
        mask = block_mask.as_tuple()
        given = query, key, value, lambda score, *_: score, mask, scale, options
        return torch_flex.flex_attention_hop(*given)[0]

    if kernel is None:
        pytest.skip(varlen.packed_attention(torch.device("cuda"), "bfloat16"))
    ends = torch.tensor([0, 2000, 3000, 4095])
    num_tokens, num_targets = 4095, 3000
    chains = ChainLayout()
    if layout == "step":
        chains = ChainLayout(lengths=ends.diff().tolist(), ends=ends)
    monkeypatch.setattr(attention, "runs_varlen", lambda *inputs: inputs[-1].ends is not None)
    monkeypatch.setattr(varlen, "VARLEN_ATTN", counted)
    monkeypatch.setattr(tree_attention, "uses_blocks", lambda _: True)
    monkeypatch.setattr(tree_attention, "compiled", lambda: flex)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32
        )
        policy = Policy(model, logprob_chunk_tokens=1024)
        tokens, targets = (torch.zeros(n, dtype=torch.int64) for n in (num_tokens, num_targets))
        forest = Forest(
            token_ids=tokens, position_ids=tokens, subtree_end=tokens,
            target_parent=targets, target_token=targets, target_slot=targets, chains=chains,
        )  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, entropy = policy(forest, torch.ones(num_targets))
        logprobs.sum().backward()
        gradients = {p.grad.dtype for p in policy.parameters() if p.grad is not None}
        assert all(p.grad is not None for p in policy.parameters())
    assert gradients == {torch.float32}
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.shape == entropy.shape == (num_targets,)
    assert len(seen) == config.num_hidden_layers
    if layout == "step":
        shapes = [(num_tokens, heads, size), (num_tokens, keys, size)]
    else:
        padded = tree_attention.padded_size(num_tokens)
        shared = heads if (heads // keys) & (heads // keys - 1) else keys
        shapes = [(1, heads, padded, size), (1, shared, padded, size)]
    wanted = [(shape, torch.bfloat16) for shape in (*shapes, shapes[-1])]
    assert all(inputs == wanted for inputs in seen)


def test_without_a_gpu_the_benchmark_says_so_in_one_sentence(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU: nothing was measured; --device cpu --tiny"):
        gpu.main()


def test_the_peak_is_that_of_the_longest_name_of_a_card():
    cards = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S")
    assert [gpu.peak_tflops(card) for card in cards] == [989.4, 756.0, 312.0, 362.1]
    assert gpu.peak_tflops("CPU, no GPU") is None


class Products(TorchDispatchMode):
    """Collects the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            self.dtypes.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def small_run(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", "--tiny", "--part", "training"])
    # An earlier run of this process may have used float32, which Accelerate keeps.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield gpu._arguments()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_all_sides_of_the_benchmark_multiply_in_bfloat16(small_run, monkeypatch):
    def once(_policy, step, **_):  # no warm-up in float32
        step()
        return {"seconds": 1.0}

    monkeypatch.setattr(training, "_measured", once)
    with opened(small_run, compiles=False) as setup:
        batch = rows_of(setup.arguments)
        sides = {
            "packed": lambda: gpu._ours(setup, batch, "step"),
            "tree": lambda: gpu._ours(setup, batch, "tree_per_group"),
            "padded": lambda: gpu._padded(setup, batch),
            "trl": lambda: gpu._trl(setup, batch),
        }
        for name, side in sides.items():
            with Products() as products:
                side()
            assert set(products.dtypes) == {torch.bfloat16}, name


@pytest.mark.slow
def test_a_side_that_fails_leaves_the_results_of_the_others(small_run, monkeypatch):
    def fail(*_):
        raise ValueError("no kernel")

    lines = []
    seen = []

    def written(line, file=sys.stdout, **_):
        if file is not sys.stderr:
            lines.append(json.loads(line))

    monkeypatch.setattr("builtins.print", written)
    monkeypatch.setattr(gpu, "_ours", lambda *_: seen.append(len(lines)) or fail())
    monkeypatch.setattr(gpu, "_trl", fail)
    small_run.json = True
    assert gpu.run_part("training", small_run) == ["packed", "tree", "trl"]
    assert seen == [2, 3]  # each line is written before the next measurement
    found = {line["name"]: line for line in lines}
    assert found["tree"]["failed"] == "ValueError: no kernel"
    assert found["padded"]["seconds"] > 0


@pytest.mark.slow
def test_a_cpu_rehearses_every_part_of_the_benchmark():
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--json"]
    done = subprocess.run(
        [*command, "--dtype", "float32"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {(line["part"], line["name"]): line for line in lines}
    assert list(dict.fromkeys(part for part, _ in found)) == [p for p in gpu.PARTS if p != "vllm"]
    assert found["ceilings", "about"]["card"] == "CPU, no GPU"
    for side in ("trl", "padded", "tree"):
        assert 0 < found["training", side]["gradient_difference"] < 1e-3
    for layout in ("packed", "tree"):
        assert found["profile", layout]["ms_by_kind"]["matrix products"] > 0
        assert found["micro", f"{layout}, 256 tokens"]["tokens_per_s"] > 0
    assert found["attention", "tree, 2 rows of 40"]["difference"] < 0.01
    assert found["engine", "4 calls"]["tokens_per_s"] > 0


def test_the_parts_of_the_benchmark_take_eight_minutes_at_most():
    assert sum(gpu.LIMIT_S[part] for part in gpu.PARTS if part != "vllm") <= 480
