"""Find poisoned rows with `rollouts blame`, and compare its cost with the cost of an update.

python -m benchmarks.blame [--updates 10] [--seed 0] [--json]     # poisoned rows
python -m benchmarks.blame --cost [--rows 32] [--layers 4]        # seconds of blame and update
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from accelerate import Accelerator

import rollout_io
from benchmarks.training import update_of
from schemas.columns import arrow_schema
from schemas.metadata import DatasetMetadata
from trainer.batch import Batch, to_batch
from trainer.batches.forest import Forest, chain_forests
from trainer.config.train_config import load_config
from trainer.forensics.blame import attribute, outlier_scores, traits
from trainer.forensics.reconstruct import Reconstruction, reconstruct
from trainer.forensics.row_gradients import linearize, norm
from trainer.loss import policy_logprobs
from trainer.models.policy import Policy, load_policy
from trainer.run.run import START, Run
from trainer.training import train
from trainer.update import make_update

MODEL = ".cache/smollm2"
CALLS = "examples/shop.calls.jsonl"
PROMPT, RESPONSE, GROUP = 16, 12, 8
NOISE = 0.03
"""Mean difference, in nats, between the log-probabilities of a bfloat16 engine and float32."""
FOREIGN = """\
Der Zug nach Freiburg hatte vierzig Minuten Verspätung, und niemand auf dem Bahnsteig wusste warum.
Die Kinder zählten die Waggons eines Güterzugs, bis es anfing zu regnen und alle unter das Dach liefen.
Wer den Schlüssel zum Keller zuletzt benutzt hat, möge ihn bitte wieder an das Brett neben der Tür hängen.
for (size_t i = 0; i < n; ++i) { acc ^= table[(acc ^ buf[i]) & 0xff] >> 8; } return ~acc;
SELECT k.land, AVG(m.wert) FROM messung m JOIN knoten k ON m.knoten = k.id GROUP BY k.land HAVING COUNT(*) > 9;
Les oiseaux migrateurs quittent la vallée dès les premières gelées, bien avant que la neige ne tombe.
"""


KINDS = ("flipped reward", "shifted log-probabilities", "foreign text")


@dataclasses.dataclass(frozen=True)
class Pool:
    """Rows sampled from the policy: P prompts with several responses each.

    Attributes:
        prompts: [P] token ids.
        responses: [P][GROUP] token ids.
        foreign: Token ids of text in other languages.
    """

    prompts: list[list[int]]
    responses: list[list[list[int]]]
    foreign: list[int]


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(arguments.seed)
    policy = load_policy(MODEL, logprob_chunk_tokens=1024)
    texts, foreign = _texts()
    if arguments.layers:
        del policy.model.base_model.layers[arguments.layers :]
        policy.model.config.num_hidden_layers = arguments.layers
    if arguments.cost:
        _show_cost(policy, texts, arguments)
        return
    texts, foreign = _without_unused_tokens(policy, texts, foreign)
    _tune(policy, texts, arguments)
    pool = _pool(policy, texts, foreign, arguments)
    found = _all_updates(policy, pool, arguments)
    _show(found, as_json=arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-rows", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2, help="number of layers to keep; 0: all")
    parser.add_argument("--tune", type=int, default=60, help="steps that adapt the cut model")
    parser.add_argument("--pool", type=int, default=96, help="prompts to sample from")
    parser.add_argument("--cost", action="store_true", help="measure the cost instead")
    parser.add_argument(
        "--rows", type=int, default=32, help="rows of the update whose cost is measured"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement")
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="also save all traits")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _texts() -> tuple[list[list[int]], list[int]]:
    """Read the token ids of recorded calls, and tokenize the foreign text."""
    from transformers import AutoTokenizer

    found = []
    for line in Path(CALLS).read_text(encoding="utf-8").splitlines():
        response = json.loads(line)["response"]
        prompt = response["prompt_token_ids"]
        found += [prompt + choice["token_ids"] for choice in response["choices"]]
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    return found, tokenizer(FOREIGN)["input_ids"]


def _without_unused_tokens(
    policy: Policy, texts: Sequence[Sequence[int]], foreign: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Reduce the model's vocabulary to the tokens that occur; return the texts with new ids."""
    used = sorted({token for text in (*texts, foreign) for token in text})
    number = {token: index for index, token in enumerate(used)}
    model = policy.model
    embedding = torch.nn.Embedding.from_pretrained(
        model.get_input_embeddings().weight.detach()[used], freeze=False
    )
    head = torch.nn.Linear(embedding.embedding_dim, len(used), bias=False)
    head.weight = embedding.weight
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    model.config.vocab_size = len(used)
    print(f"{len(used):,} of the tokens are used", flush=True)
    return [[number[token] for token in text] for text in texts], [number[t] for t in foreign]


def _tune(policy: Policy, texts: Sequence[Sequence[int]], arguments: argparse.Namespace) -> None:
    """Fine-tune the reduced model on the recorded calls, so that it predicts text again."""
    rng = np.random.default_rng(arguments.seed)
    settings = {"loss.policy_loss_type": "cross_entropy", "optimizer.learning_rate": 1e-3}
    learner = _learner(policy, torch.optim.AdamW(policy.parameters(), lr=1e-3), **settings)
    for step in range(arguments.tune):
        rows = []
        for number in rng.integers(len(texts), size=16):
            start = int(rng.integers(max(len(texts[number]) - 48, 1)))
            part = texts[number][start : start + 48]
            rows.append({"prompt_token_ids": part[:1], "response_ids": part[1:]})
        batch = _batch(rows)
        for group in learner.optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 20) * (1 - step / arguments.tune)
        loss = make_update(learner, update_of(batch, _forests(batch)), START).metrics["loss"]
        if step % 25 == 0 or step == arguments.tune - 1:
            print(f"tuning, step {step}: {loss:.2f} nats per token", flush=True)


def _pool(
    policy: Policy,
    texts: Sequence[Sequence[int]],
    foreign: Sequence[int],
    arguments: argparse.Namespace,
) -> Pool:
    """Sample responses from the policy; prompts are random parts of recorded calls."""
    rng = np.random.default_rng((arguments.seed, 1))
    prompts, responses = [], []
    for number in rng.integers(len(texts), size=arguments.pool):
        end = int(rng.integers(PROMPT, len(texts[number])))
        prompts.append(list(texts[number][end - PROMPT : end]))
    given = torch.tensor([prompt for prompt in prompts for _ in range(GROUP)])
    torch.manual_seed(arguments.seed)
    for part in given.split(256):
        made = policy.model.generate(
            part, attention_mask=torch.ones_like(part), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, min_new_tokens=RESPONSE, max_new_tokens=RESPONSE, pad_token_id=0,
        )  # fmt: skip
        responses += made[:, PROMPT:].tolist()
    return Pool(
        prompts, [responses[i : i + GROUP] for i in range(0, len(responses), GROUP)], list(foreign)
    )


def _poisoned(
    policy: Policy, pool: Pool, kind: str, rng: np.random.Generator, num_rows: int
) -> tuple[Batch, int]:
    """Build a batch with one poisoned row, and return it with the index of that row."""
    num_groups = num_rows // GROUP
    rows: list[dict[str, Any]] = []
    for number in rng.choice(len(pool.prompts), num_groups, replace=num_groups > len(pool.prompts)):
        rewards = (rng.random(GROUP) < rng.beta(1, 1)).astype(float)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        rows += [
            {"prompt_token_ids": pool.prompts[number], "response_ids": r, "advantage": float(a)}
            for r, a in zip(pool.responses[number], advantages, strict=True)
        ]
    poisoned = int(rng.integers(len(rows)))
    row = rows[poisoned]
    if kind == "foreign text":
        start = int(rng.integers(len(pool.foreign) - RESPONSE))
        row["response_ids"] = pool.foreign[start : start + RESPONSE]
    if kind == "flipped reward":
        sign = -np.sign(row["advantage"]) or rng.choice([-1.0, 1.0])
        row["advantage"] = float(sign * rng.uniform(4, 8))
    batch = _batch(rows)
    logprobs = policy_logprobs(_learner(policy), batch, _forests(batch)).numpy()
    noise = rng.normal(size=len(logprobs)) * NOISE * np.sqrt(np.pi / 2)
    logprobs = np.minimum(logprobs + noise, 0.0).astype(np.float32)
    begin, end = batch.responses.offsets[poisoned : poisoned + 2]
    if kind == "shifted log-probabilities":
        logprobs[begin:end] = np.roll(logprobs[begin:end], 1)
    return dataclasses.replace(batch, rollout_logprobs=torch.from_numpy(logprobs)), poisoned


def _all_updates(policy: Policy, pool: Pool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rank the rows of simulated updates, and print the rank of each poisoned row."""
    found = []
    for number in range(arguments.updates):
        rng = np.random.default_rng((arguments.seed, 2, number))
        num_rows = int(64 * (arguments.most_rows / 64) ** rng.random()) // GROUP * GROUP
        kind = KINDS[number % len(KINDS)]
        batch, poisoned = _poisoned(policy, pool, kind, rng, num_rows)
        start = time.perf_counter()
        learner, forests = _learner(policy), _forests(batch)
        update = linearize(learner, batch, forests)
        norms, total = update.gradients()
        products = update.products(total)
        row_of = batch.responses.row_of(np.arange(len(products)))
        share = np.bincount(row_of, products) / norm(total) ** 2
        of_rows = traits(update, norms, share)
        scores = np.max(list(outlier_scores(of_rows).values()), axis=0)
        place = int((scores > scores[poisoned]).sum()) + 1
        by_norm = int((norms > norms[poisoned]).sum()) + 1
        found.append(
            {
                "kind": kind,
                "rows": num_rows,
                "place": place,
                "place_by_norm": by_norm,
                "poisoned": poisoned,
                "traits": {name: values.tolist() for name, values in of_rows.items()},
            }
        )
        seconds = time.perf_counter() - start
        print(
            f"update {number}: {num_rows} rows, {kind}: place {place}, by norm {by_norm} ({seconds:.0f} s)",
            flush=True,
        )
        if arguments.save:
            arguments.save.write_text(json.dumps(found), encoding="utf-8")
    return found


def _show(found: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    figures = {}
    for kind in (*KINDS, "all"):
        places = [f for f in found if kind in ("all", f["kind"])]
        figures[kind] = {
            "updates": len(places),
            "first": sum(f["place"] == 1 for f in places),
            "first_three": sum(f["place"] <= 3 for f in places),
            "first_three_by_norm": sum(f["place_by_norm"] <= 3 for f in places),
        }
    if as_json:
        print(json.dumps(figures))
        return
    print(f"{'poisoned row':28}{'updates':>9}{'first':>9}{'first 3':>9}{'by norm':>9}")
    for kind, numbers in figures.items():
        print(f"{kind:28}" + "".join(f"{number:9}" for number in numbers.values()))


def _batch(rows: Sequence[dict[str, Any]]) -> Batch:
    table = pl.DataFrame(
        {
            "name": [f"row {number}" for number in range(len(rows))],
            "instance_id": [f"g{number // GROUP}" for number in range(len(rows))],
            "trajectory_id": [f"g{number // GROUP}_{number % GROUP}" for number in range(len(rows))],
            "prompt_token_ids": pl.Series([r["prompt_token_ids"] for r in rows], dtype=pl.List(pl.Int32)),
            "response_ids": pl.Series([r["response_ids"] for r in rows], dtype=pl.List(pl.Int32)),
            "loss_mask": [[True] * len(r["response_ids"]) for r in rows],
            "rollout_logprobs": pl.Series([[0.0] * len(r["response_ids"]) for r in rows], dtype=pl.List(pl.Float32)),
            "temperature": pl.Series([1.0] * len(rows), dtype=pl.Float32),
            "reward": [0.0] * len(rows),
            "trains": [True] * len(rows),
            "advantage": [r.get("advantage", 0.0) for r in rows],
            "mini_batch": [0] * len(rows),
        }
    )  # fmt: skip
    return to_batch(table)


def _forests(batch: Batch) -> list[Forest]:
    rows = np.arange(len(batch.names))
    return chain_forests(batch.prompts, batch.responses, batch.trains, rows, 2048)


PATHS = {"data.dataset": "-", "model.path": "-", "run.out": "-", "run.record_tokens": "none"}


def _learner(
    policy: Policy, optimizer: torch.optim.Optimizer | None = None, **settings: Any
) -> Run:
    config = load_config(None, options=PATHS | settings)
    return Run(
        accelerator=Accelerator(),
        policy=policy,
        optimizer=optimizer or torch.optim.SGD(policy.parameters(), lr=1e-6),
        config=config,
        corrects_for_sampler=config.loss.corrects_for_sampler,
    )


def _show_cost(
    policy: Policy, texts: Sequence[Sequence[int]], arguments: argparse.Namespace
) -> None:
    """Measure the CPU seconds of blame and of its update in turn, and print the medians."""
    with tempfile.TemporaryDirectory() as folder:
        found = _run(Path(folder), policy, texts, arguments)
        _print_cost(found, arguments)


def _run(
    folder: Path, policy: Policy, texts: Sequence[Sequence[int]], arguments: argparse.Namespace
) -> Reconstruction:
    """Train the model for two updates, and reconstruct the second one."""
    rng = np.random.default_rng(arguments.seed)
    policy.model.save_pretrained(folder / "model")
    rows = []
    for index, number in enumerate(rng.integers(len(texts), size=arguments.rows)):
        end = max(len(texts[number]) * 2 // 3, 1)
        group, repetition = divmod(index, GROUP)
        rows.append(
            {
                "instance_id": f"g{group}",
                "repetition_id": repetition,
                "trajectory_id": f"g{group}_{repetition}",
                "step_index": 0,
                "token_source": "engine",
                "is_last_step": True,
                "prompt_token_ids": texts[number][:end],
                "response_ids": texts[number][end:],
                "loss_mask": [True] * (len(texts[number]) - end),
                "reward": float(rng.normal()),
            }
        )
    with rollout_io.RolloutWriter(folder / "rows", metadata=DatasetMetadata()) as writer:
        writer.write(pa.Table.from_pylist(rows, schema=arrow_schema(tuple(rows[0]))))
    num_groups = -(-arguments.rows // GROUP)
    train(
        load_config(
            None,
            ["loss.tis_ratio_type=none"],
            {
                "data.dataset": str(folder / "rows"),
                "model.path": str(folder / "model"),
                "run.out": str(folder / "run"),
                "optimizer.learning_rate": 1e-5,
                "batch.groups_per_batch": num_groups,
                "batch.groups_per_mini_batch": num_groups,
                "batch.num_epochs": 2,
                "batch.sequence_layout": "step",
                "batch.tokens_per_micro_batch": 2048,
                "run.save_every_updates": 1,
            },
        )
    )
    return reconstruct(folder / "run", 2)


def _print_cost(found: Reconstruction, arguments: argparse.Namespace) -> None:
    learner, batch, forests = found.run, found.pending.batch, found.pending.forests
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        made = work()
        seconds.setdefault(name, []).append(time.process_time() - start)
        return made

    for _ in range(arguments.rounds):
        timed("update", lambda: make_update(found.run, found.pending, found.progress))
        update = linearize(learner, batch, forests)
        _, total = timed("norms", update.gradients)
        timed("inner_products", partial(update.products, total))
        timed("blame", lambda: attribute(found))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["blame"] / medians["update"]
    sizes = {
        "rows": len(update.rows),
        "groups": len(batch.group_names),
        "tokens": sum(forest.num_tokens for forest in forests),
        "targets": sum(forest.num_targets for forest in forests),
        "layers": len(learner.policy.model.base_model.layers),
    }
    if arguments.json:
        print(json.dumps(sizes | medians | {"ratio": ratio}))
        return
    print(", ".join(f"{value:,} {name}" for name, value in sizes.items()))
    for name, value in medians.items():
        print(f"{name:16}{value:8.1f} CPU s{value / medians['update']:8.2f}x")


if __name__ == "__main__":
    main()
