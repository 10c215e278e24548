"""What must hold on a GPU. `tests/gpu` runs it there; a CPU runs it smaller, to prove the checks."""

import dataclasses
import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from schemas.ragged import Ragged
from tests.helpers.configs import train_config
from tests.helpers.rl_helpers import config_of, weights_of
from tests.helpers.trainer_helpers import forests_of, run_of, update_with
from tests.helpers.tree_helpers import batch_of, mini_batch_of
from trainer import rl
from trainer.batches.forest import with_sets
from trainer.batches.sampling_support import teacher_sets
from trainer.distributed.accelerator import whole
from trainer.models.layers import compile_layers
from trainer.models.lora import add_adapter
from trainer.models.policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model and of its rows. Weights are large enough that every token matters."""

    vocab_size: int = 512
    hidden_size: int = 256
    num_layers: int = 4
    head_dim: int = 64
    num_trajectories: int = 6
    num_turns: int = 6
    turn_tokens: int = 40


TINY = Size(
    hidden_size=32, num_layers=2, head_dim=16, num_trajectories=3, num_turns=3, turn_tokens=7
)


def model_of(size, window=None):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=2 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=6,  # three heads share a key
        num_key_value_heads=2,
        head_dim=size.head_dim,
        max_position_embeddings=4096,
        initializer_range=1.1 / size.hidden_size**0.5,
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=["sliding_attention" if window and n % 2 else "full_attention" for n in range(size.num_layers)],
    )  # fmt: skip
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")


def policy_of(size, device, window=None):
    return Policy(model_of(size, window), logprob_chunk_tokens=64).to(device)


def turns(size, seed):
    """Trajectories of one task whose prompts keep all but the first tokens of the last response."""
    rng = np.random.default_rng(seed)

    def tokens():
        found = rng.integers(0, size.vocab_size, rng.integers(2, size.turn_tokens)).tolist()
        return found

    rows = []
    ids = []
    start = tokens()
    for trajectory in range(size.num_trajectories):
        prompt = start
        for _ in range(size.num_turns):
            response = tokens()
            rows.append((prompt, response, [True] * len(response)))
            ids.append(("g", f"g_{trajectory}"))
            prompt = prompt + response[1:] + tokens()
    return rows, ids


def padded_logprobs(model, rows, device):
    """Compute the log-probabilities of all responses with Transformers, padded on the right."""
    lengths = [len(prompt) + len(response) for prompt, response, _ in rows]
    ids, attended = (torch.zeros(len(rows), max(lengths), dtype=torch.int64) for _ in range(2))
    for number, (prompt, response, _) in enumerate(rows):
        ids[number, : lengths[number]] = torch.tensor(prompt + response)
        attended[number, : lengths[number]] = 1
    ids, attended = ids.to(device), attended.to(device)
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    parts = [logprobs[n, len(rows[n][0]) - 1 : lengths[n] - 1] for n in range(len(rows))]
    return torch.cat(parts)


def logprobs_of(policy, forests, device):
    """Return the log-probability of each response token, as the batch orders them."""
    num_targets = sum(forest.num_targets for forest in forests)
    parts = [
        policy(f.to(torch.device(device)), torch.ones(f.num_targets, device=device))[0]
        for f in forests
    ]
    slots = torch.cat([forest.target_slot for forest in forests])
    assert sorted(slots.tolist()) == list(range(num_targets))
    return torch.cat(parts)[slots.argsort().to(device)]


def check_bfloat16(device, size, window, layout):
    """Log-probabilities and gradients are as close to float64 as those of padded Transformers.

    Returns the number of forests that were forwarded.
    """
    family = turns(size, 0)
    batch = batch_of(family)
    weights = torch.randn(len(batch.trains), generator=torch.Generator().manual_seed(1))
    reference = model_of(size, window).double()
    exact = padded_logprobs(reference, family[0], "cpu")
    (exact * weights).sum().backward()

    plain = model_of(size, window).to(device)
    policy = policy_of(size, device, window)
    forests = forests_of(batch) if layout == "step" else mini_batch_of(batch).forests
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        theirs = padded_logprobs(plain, family[0], device)
        ours = logprobs_of(policy, forests, device)
    for found in (theirs, ours):
        (found * weights.to(device)).sum().backward()

    errors = [
        float((found.detach().cpu() - exact.detach()).abs().mean()) for found in (ours, theirs)
    ]
    assert errors[0] < 1.5 * errors[1] + 1e-3, errors
    assert errors[0] < float(exact.detach().std()) / 10, errors
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    models = (policy.model, plain)
    errors = [_distance(model, wanted) for model in models]
    assert errors[0] < 1.5 * errors[1] + 1e-3, errors
    assert errors[0] < 0.3, errors
    return len(forests)


def _distance(model, wanted):
    found = {name: p.grad.double().cpu() for name, p in model.named_parameters()}
    assert found.keys() == wanted.keys()
    above = sum(float((found[n] - wanted[n]).square().sum()) for n in wanted)
    return (above / sum(float(g.square().sum()) for g in wanted.values())) ** 0.5


def graphs_over_shapes(device, size, num_batches):
    """Update on batches of different shapes, with and without gradients; count compiled graphs."""
    counters = torch._dynamo.utils.counters["stats"]
    before = int(counters["unique_graphs"])
    policy = policy_of(size, device, window=size.turn_tokens)
    sizes = set()
    for number in range(num_batches):
        shape = dataclasses.replace(size, num_turns=1 + number % size.num_turns)
        forests = mini_batch_of(batch_of(turns(shape, number))).forests
        sizes.add(forests[0].num_tokens)
        with (
            torch.autocast(torch.device(device).type, torch.bfloat16),
            torch.set_grad_enabled(number % 4 > 0),
        ):
            found = logprobs_of(policy, forests, device)
        if number % 4:
            found.sum().backward()
        assert torch.isfinite(found).all()
    assert len(sizes) > num_batches / 2
    return int(counters["unique_graphs"]) - before


def policy_of_kind(size, device, kind):
    """A policy whose layers are `dense`, or have LoRA adapters (`lora`) or experts (`experts`)."""
    if kind == "experts":
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            **{k: v for k, v in model_of(size).config.to_dict().items() if k in SHARED},
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=size.hidden_size // 2,
        )  # fmt: skip
        model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa")
        return Policy(model, logprob_chunk_tokens=64).to(device)
    policy = Policy(model_of(size), logprob_chunk_tokens=64)
    if kind == "lora":
        add_adapter(policy, train_config(dataset="d", model="m", out="o", lora_rank=4).model)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:  # 0 at first: A would have no gradient
                torch.nn.init.normal_(parameter, std=0.1)
    return policy.to(device)


SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "initializer_range",
)  # fmt: skip


def compiled_difference(device, size, kind, layout):
    """The difference of a gradient with compiled layers to one without, in float32, relative."""
    batch, found = batch_of(turns(size, 0)), []
    policy = policy_of_kind(size, device, kind)
    forests = mini_batch_of(batch, sequence_layout=layout).forests
    for is_compiled in (False, True):
        if is_compiled:
            compile_layers(policy.model)
        policy.zero_grad()
        logprobs_of(policy, forests, device).sum().backward()
        found.append(
            torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        )
    assert float(found[0].norm()) > 0
    return float((found[1] - found[0]).norm() / found[0].norm())


def sets_difference(device, size, kind):
    """The largest difference to a CPU where the targets have sets of ids (`sampler`, `teacher`)."""
    family, rng, found = turns(size, 0), np.random.default_rng(0), []
    batch = batch_of(family)
    num_targets, own = len(batch.trains), [t for _, response, _ in family[0] for t in response]
    sizes = rng.integers(2, 9, num_targets)
    ids = np.concatenate(
        [(token + rng.permutation(size.vocab_size - 1)[: n - 1] + 1) % size.vocab_size for token, n in zip(own, sizes, strict=True)]
    )  # fmt: skip
    offsets = np.cumsum([0, *sizes])
    ids = np.insert(ids, offsets[:-1] - np.arange(num_targets), own)
    support = Ragged(ids.astype(np.int32), offsets, np.ones(num_targets, dtype=np.bool_))
    logprobs = Ragged(np.log(rng.uniform(0.01, 0.1, len(ids))).astype(np.float32), offsets, support.valid)  # fmt: skip
    forests = with_sets(forests_of(batch), support)
    if kind == "teacher":
        forests = [
            dataclasses.replace(
                f,
                sets=None,
                teacher=teacher_sets((support, logprobs), f.target_slot, is_reverse=True),
            )
            for f in forests
        ]
    for place in ("cpu", device):
        policy = policy_of(size, place)
        for forest in forests:
            outputs = policy(
                forest.to(torch.device(place)), torch.ones(forest.num_targets, device=place)
            )
            outputs[2 if kind == "teacher" else 0].sum().backward()
        gradient = [p.grad.flatten().cpu() for p in policy.parameters() if p.grad is not None]
        found.append(torch.cat([outputs[2 if kind == "teacher" else 0].detach().cpu(), *gradient]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def check_fsdp2(device, size, *, compiles):
    """A model sharded over one process has the gradient of a whole one, in float32."""
    # The process group and Accelerate's state would otherwise outlive the test.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        difference = process.submit(fsdp2_difference, device, size, compiles).result()
    assert difference < 1e-4, difference


def fsdp2_difference(device, size, compiles):
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            batch = batch_of(turns(size, 0))
            wanted = _gradient(policy_of(size, device), batch)
            policy = policy_of(size, device)
            if compiles:
                compile_layers(policy.model, recomputes=True)
            mesh = init_device_mesh(torch.device(device).type, (1,))
            for layer in policy.model.base_model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(policy, mesh=mesh)
            found = _gradient(policy, batch)
        finally:
            torch.distributed.destroy_process_group()
    return float((found - wanted).norm() / wanted.norm())


def _gradient(policy, batch):
    learner = run_of(policy, max_grad_norm=1e9, learning_rate=1e-30)
    kept = []

    def keep(*_):
        kept.extend(whole(p.grad).flatten() for p in policy.parameters() if p.grad is not None)

    learner.optimizer.register_step_pre_hook(keep)
    update_with(learner, batch, mini_batch_of(batch).forests, None)
    return torch.cat(kept)


def save_large_model(path, tokenizer, *, tiny):
    """Qwen3-0.6B with random weights and SmolLM2's tokens: 0.5B parameters."""
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=16 if tiny else 1024,
        intermediate_size=32 if tiny else 3072,
        num_hidden_layers=2 if tiny else 28,
        num_attention_heads=2 if tiny else 16,
        num_key_value_heads=1 if tiny else 8,
        head_dim=16 if tiny else 128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.backend.save_pretrained(path)
    return str(path)


def check_rl_iteration(folder, tokenizer, *, tiny):
    """One iteration samples, trains in bfloat16 and saves other weights; both sides agree."""
    model = save_large_model(folder / "model", tokenizer, tiny=tiny)
    train = {"dtype": "bfloat16", "sequence_layout": "tree"}
    config = config_of(folder, model, num_iterations=1, train=train)
    # An earlier run of this process may have used float32, which Accelerate keeps.
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        result = rl.run(config)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert result.num_updates > 0
    assert weights_of(result.checkpoint) != (Path(model) / "model.safetensors").read_bytes()
    lines = [json.loads(x) for x in (folder / "run/metrics.jsonl").read_text().splitlines()]
    differences = [x["rollout_logprobs_abs_diff_mean"] for x in lines if "loss" in x]
    assert differences
    assert max(differences) < 0.1, differences
