"""Sample rollouts with planted faults from a real run's versions, for `benchmarks.audit`.

Every response comes from a real vLLM server through `rollouts generate`'s own code. A case is one
trajectory: a list of calls, each with the weights that answer it. The calls run in rounds, and in
each round the server loads one version after the other. The labels of a call (version,
temperature, prompt, ...) are chosen afterwards: correctly for a clean case, otherwise with a fault.
Ids and the order of rows are random, so only `labels.parquet` records which rows have a fault.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rollout_io
from examples.addition import main as write_tasks
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.vllm import VllmEngine
from pipelines.generation.processes import VllmServer
from pipelines.generation.run import generate
from pipelines.merging.merge import merge_table
from rollout_io.dataset.writer import RolloutWriter
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.columns import COLUMN_BY_NAME
from trainer import rl

TOPICS = [
    *("the moon", "bees", "bread", "a lighthouse", "chess", "rivers", "volcanoes", "a lost cat"),
    *("steam engines", "the desert", "honesty", "Paris", "winter", "penguins", "gravity", "tea"),
    *("whales", "a market", "clouds", "the number seven", "glass", "mountains", "a violin", "salt"),
    *("robots", "maps", "an old bridge", "sleep", "rain", "the library", "birds", "copper"),
]
QUESTIONS = [
    "Tell me about {}.",
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List three facts about {}.",
    "Write a poem about {}.",
    "What would you ask an expert on {}?",
    "Describe {} in detail.",
    "Why do people care about {}?",
]
FOLLOW_UPS = ["Go on.", "Why?", "Say it in other words.", "Give an example.", "And then?"]

ALL = {"temperature": 1.0, "top_p": 1.0, "top_k": None}
SETTINGS = [
    *[ALL] * 14,
    *({"temperature": 0.7}, {"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 1.3}),
    *({"top_p": 0.9}, {"top_k": 20}),
]
"""Sampling settings of clean rows, which their labels record correctly."""
VARIANTS = ("no_system", "other_system", "no_generation_prompt", "no_newlines", "double_bos")
OTHER_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
PER_TOKEN = ("response_ids", "rollout_logprobs")
EXACT = 1e-3
"""Upper bound of the float32 server's error in log-probabilities, in nats."""
COLUMNS = (
    *("instance_id", "repetition_id", "trajectory_id", "step_index", "is_last_step"),
    *("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward"),
    *("stop_reason", "policy_version", "temperature", "top_p", "top_k", "token_source"),
    *("messages", "response_text"),
)


@dataclass(kw_only=True)
class Call:
    """One request to the server.

    Attributes:
        weights: Key of the weights that answer the call: a version such as "3", or a name such as
            "3-int8", "foreign" or "adapter-2".
        text: The user's message; None to continue the response of the previous call.
        sampling: Fields of `Sampling`, including `max_tokens`.
        label: `policy_version` of the row.
        fault: Name of the planted fault; "clean" if there is none.
        says: False values to write to columns of the row, by column.
        shift: Number of positions by which to shift the stored log-probabilities.
        variant: Name of a different rendering of the prompt; None: only the chat template's.
        engine_has_variant: True if the engine saw the variant; false if the row stores it.
    """

    weights: str
    text: str | None
    sampling: dict[str, Any]
    label: int
    fault: str = "clean"
    says: dict[str, Any] = field(default_factory=dict)
    shift: int = 0
    variant: str | None = None
    engine_has_variant: bool = False


@dataclass(kw_only=True)
class Case:
    """One trajectory of a dataset: its planned calls, and the answers to them."""

    name: str
    dataset: str
    server: str
    calls: list[Call]
    answers: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = True


class Plan:
    """Draws the cases of the datasets at random.

    Args:
        seed: Seed of all random draws.
        versions: Policy versions of the run, in order.
        scale: Factor by which to multiply the numbers of cases.
    """

    def __init__(self, seed: int, versions: Sequence[int], scale: float) -> None:
        self.random, self.versions, self.scale = random.Random(seed), list(versions), scale
        self.cases: list[Case] = []
        self._names = count()

    def repeat(self, number: int) -> range:
        """Return a range for drawing `number` cases, multiplied by the scale."""
        return range(max(1, round(number * self.scale)))

    def length(self) -> int:
        """Draw the maximum length of a response: 5 to 200 tokens, often 20 to 60."""
        low, high = self.random.choices(
            [(5, 20), (20, 60), (60, 120), (120, 200)], [3, 6, 1.5, 0.4]
        )[0]
        return self.random.randint(low, high)

    def text(self) -> str:
        """Draw the text of a user message."""
        return self.random.choice(QUESTIONS).format(self.random.choice(TOPICS))

    def settings(self) -> dict[str, Any]:
        """Draw the sampling settings of a clean row."""
        return ALL | self.random.choice(SETTINGS)

    def call(self, weights: object, label: int, **changes: Any) -> Call:
        """Draw a call; `changes` overrides fields of `Call` and sampling settings."""
        sampling = self.settings() | {"max_tokens": self.length()}
        sampling |= {k: changes.pop(k) for k in list(changes) if k in sampling}
        text = changes.pop("text", self.text())
        return Call(weights=str(weights), text=text, sampling=sampling, label=label, **changes)

    def add(self, dataset: str, server: str, *calls: Call) -> None:
        """Add a case, which consists of the given calls."""
        name = f"t{next(self._names):05d}"
        self.cases.append(Case(name=name, dataset=dataset, server=server, calls=list(calls)))

    def version(self, first: int = 0) -> int:
        """Draw a version, excluding the `first` oldest."""
        return self.random.choice(self.versions[first:])

    def older(self) -> tuple[int, int]:
        """Draw a version and an older one; they are at most two versions apart."""
        new = self.version(first=1)
        return new, max(self.versions[0], new - self.random.choice([1, 1, 2]))


def plan_steps(p: Plan) -> None:
    """Plan single-step rows with processed log-probabilities: all faults except old adapters."""
    for _ in p.repeat(1000):
        v = p.version()
        p.add("steps", "processed", p.call(v, v))
    for _ in p.repeat(25):
        new, old = p.older()
        p.add("steps", "processed", p.call(old, new, fault="stale_version"))
        v = p.version(first=1)
        p.add("steps", "processed", p.call(v, v - 1, fault="label_behind"))
    for _ in p.repeat(40):
        new, old = p.older()
        parts = [p.random.randint(5, 60), p.random.randint(5, 60)]
        parts[1] = max(parts[1], 25 - parts[0])
        settings = p.settings()
        first = p.call(old, old, fault="swap", max_tokens=parts[0], **settings)
        rest = p.call(new, old, fault="swap", max_tokens=parts[1], text=None, **settings)
        p.add("steps", "processed", first, rest)
    for i in p.repeat(25):
        v = p.version()
        changes = ALL | {"temperature": (0.7, 1.3)[i % 2]}
        wrong = p.call(v, v, fault="temperature", says={"temperature": 1.0}, **changes)
        p.add("steps", "processed", wrong)
    for i in p.repeat(25):
        v = p.version()
        p.add("steps", "processed", p.call(v, v, fault="shifted", shift=(1, -1)[i % 2]))
    for i in p.repeat(25):
        v = p.version()
        changes = ALL | ({"temperature": 0.7}, {"temperature": 1.3}, {"top_p": 0.8})[i % 3]
        p.add("steps", "raw", p.call(v, v, fault="raw", **changes))
    for i in p.repeat(25):
        v = quantised_versions(p.versions)[i % 2]
        p.add(
            "steps",
            "processed",
            p.call(f"{v}-{('bf16', 'int8')[i // 2 % 2]}", v, fault="quantised"),
        )
    for i in p.repeat(25):
        v = p.version()
        variant, by_engine = VARIANTS[i % len(VARIANTS)], i // len(VARIANTS) % 2 == 1
        changed = {"fault": "prompt", "variant": variant, "engine_has_variant": by_engine}
        p.add("steps", "processed", p.call(v, v, **changed))
    for i in p.repeat(25):
        v = p.version()
        changes = ALL | ({"top_p": 0.9}, {"top_p": 0.8}, {"top_k": 20})[i % 3]
        says = {"top_p": 1.0, "top_k": 0}
        p.add("steps", "processed", p.call(v, v, fault="truncated", says=says, **changes))
    for _ in p.repeat(12):
        p.add("steps", "processed", p.call("foreign", p.version(), fault="foreign"))


def quantised_versions(versions: Sequence[int]) -> tuple[int, int]:
    """Choose the two versions to copy with rounded weights."""
    return versions[len(versions) // 2], versions[-1]


def plan_merged(p: Plan) -> None:
    """Plan trajectories of several turns, merged to one row each; in some, one turn has a fault."""

    def turn(weights: object, label: int, number: int, **changes: Any) -> Call:
        text = {} if number == 0 else {"text": p.random.choice(FOLLOW_UPS)}
        short = {"max_tokens": p.random.randint(8, 45)} | ALL
        return p.call(weights, label, **(text | short | changes))

    for kind in [
        *["clean"] * 100,
        *["stale_version"] * 12,
        *["temperature"] * 8,
        *["shifted"] * 8,
        *["swap"] * 8,
    ]:
        if p.random.random() > p.scale:
            continue
        size, begin = p.random.randint(2, 4), p.version(first=1)
        wrong, calls, v = p.random.randrange(size), [], begin
        for number in range(size):
            if number and v < p.versions[-1] and p.random.random() < 0.3:
                v += 1  # weights that the loop loaded between two turns, and labelled
            if number != wrong or kind == "clean":
                calls.append(turn(v, v, number))
            elif kind == "stale_version":
                calls.append(
                    turn(v - 1, v, number, fault=kind, max_tokens=p.random.randint(22, 60))
                )
            elif kind == "temperature":
                says, changes = {"temperature": 1.0}, {"temperature": p.random.choice([0.7, 1.3])}
                calls.append(turn(v, v, number, fault=kind, says=says, **changes))
            elif kind == "shifted":
                calls.append(turn(v, v, number, fault=kind, shift=p.random.choice([1, -1])))
            else:
                calls.append(turn(v - 1, v - 1, number, fault=kind))
                rest = {"text": None, "fault": kind, "max_tokens": p.random.randint(15, 40)}
                calls.append(turn(v, v - 1, number, **rest))
        p.add("merged", "processed", *calls)


def plan_raw(p: Plan) -> None:
    """Plan rows with raw log-probabilities, vLLM's default."""
    for _ in p.repeat(200):
        v = p.version()
        p.add("raw", "raw", p.call(v, v))
    for _ in p.repeat(25):
        new, old = p.older()
        p.add("raw", "raw", p.call(old, new, fault="stale_version"))
    for i in p.repeat(24):
        v = p.version()
        changes = ALL | {"temperature": (0.7, 1.3)[i % 2]}
        p.add("raw", "raw", p.call(v, v, fault="temperature", says={"temperature": 1.0}, **changes))


def plan_bfloat16(p: Plan) -> None:
    """Plan rows of a server that computes in bfloat16."""
    for _ in p.repeat(150):
        v = p.version()
        p.add("bfloat16", "bfloat16", p.call(v, v))
    for _ in p.repeat(30):
        new, old = p.older()
        p.add("bfloat16", "bfloat16", p.call(old, new, fault="stale_version"))
    for i in p.repeat(16):
        v = p.version()
        changes = ALL | {"temperature": (0.7, 1.3)[i % 2]}
        wrong = p.call(v, v, fault="temperature", says={"temperature": 1.0}, **changes)
        p.add("bfloat16", "bfloat16", wrong)
    for i in p.repeat(16):
        v = p.version()
        p.add("bfloat16", "bfloat16", p.call(v, v, fault="shifted", shift=(1, -1)[i % 2]))


def plan_adapters(p: Plan, server: str) -> None:
    """Plan rows of a server with LoRA adapters; some use an older adapter, or none."""
    for _ in p.repeat(100):
        v = p.version()
        p.add("adapter", server, p.call(f"adapter-{v}", v))
    for _ in p.repeat(25):
        new, old = p.older()
        p.add("adapter", server, p.call(f"adapter-{old}", new, fault="stuck_adapter"))


def plan_in_flight(p: Plan) -> list[list[Case]]:
    """Plan responses during which the server swaps its weights; each round has one swap."""
    rounds = []
    for new in (p.versions[-3], p.versions[-1]):
        before = len(p.cases)
        for _ in p.repeat(24):
            changes = ALL | {"max_tokens": p.random.randint(40, 120)}
            first = p.call(new - 1, new - 1, fault="swap_in_flight", **changes)
            rest = p.call(new, new - 1, fault="swap_in_flight", text=None, **changes)
            p.add("in_flight", "in_flight", first, rest)
        for _ in p.repeat(30):
            p.add("in_flight", "processed", p.call(new - 1, new - 1, **ALL))
        rounds.append([case for case in p.cases[before:] if case.server == "in_flight"])
    return rounds


async def agent(client: Any, task: Any) -> float:
    """Make the only call of a task, with the prompt ids of the task if it has any."""
    given = task.extras
    if given["ids"] is not None:
        await client.sample(given["ids"], **given["sampling"])
    else:
        await client.chat(task.prompt, **given["sampling"])
    return 0.0


class Sampler:
    """Sends the calls of cases to a server, and builds rows and labels from the answers.

    Args:
        folder: Folder for intermediate datasets.
        model: Model directory with the tokenizer.
        seed: Seed of the sampled tokens.
    """

    def __init__(self, folder: Path, model: str, seed: int) -> None:
        self.folder, self.model, self.seed = folder, model, seed
        self.tokenizer = load_tokenizer(model)
        self._parts = count()

    def run(self, cases: Sequence[Case], url: str, weights: Mapping[str, str]) -> None:
        """Make all calls of the given cases, and store the answers in the cases.

        Args:
            cases: Cases of one server.
            url: URL of the server.
            weights: For each key of weights, the model directory to load; or, with the prefix
                "name:", a model name that the server already serves.
        """
        for number in range(max((len(case.calls) for case in cases), default=0)):
            here = [c for c in cases if len(c.calls) > number and c.is_complete]
            rounds = defaultdict(list)
            for case in here:
                call = case.calls[number]
                # Truncated calls are separate: vLLM sorts the logits of their whole batch.
                truncates = call.sampling["top_p"] < 1 or call.sampling["top_k"] is not None
                rounds[call.weights, truncates].append(case)
            for (key, _), chosen in sorted(rounds.items()):
                self._round(chosen, number, url, weights[key], key)

    def _round(self, cases: list[Case], number: int, url: str, where: str, key: str) -> None:
        name = where.removeprefix("name:") if where.startswith("name:") else None
        if name is None:
            asyncio.run(_load(url, where))
        tasks = [self._task(case, number) for case in cases]
        config = self._config(tasks, url, number)
        opened = partial(VllmEngine, url, model=name) if name else partial(VllmEngine, url)
        result = asyncio.run(generate(config, lambda _: opened()))
        if result.num_failed:
            raise RuntimeError(result.first_error)
        rate = result.num_response_tokens / result.duration_s
        print(f"  {key}, call {number}: {len(cases)} calls, {rate:.0f} tokens/s", flush=True)
        rows = {row["instance_id"]: row for row in rollout_io.read(config.out).to_pylist()}
        for case in cases:
            self._answered(case, number, rows[case.name])

    def _config(self, tasks: Sequence[Mapping[str, Any]], url: str, number: int) -> GenerateConfig:
        part = self.folder / f"part{next(self._parts)}"
        part.with_suffix(".jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
        return GenerateConfig(
            tasks=str(part.with_suffix(".jsonl")),
            model=self.model,
            out=str(part),
            engine="vllm",
            urls=(url,),
            agent="benchmarks.audit_data:agent",
            seed=self.seed + number,
            max_concurrency=32,
        )

    def run_across_a_swap(
        self, cases: Sequence[Case], url: str, weights: Mapping[str, str]
    ) -> None:
        """Start calls with the old weights, and load new ones when the first response is complete.

        The server keeps the keys and values that the old weights computed, as in `rollouts rl`
        with `weight_sync = "now"`. `settle_swaps` finds where each response changed.
        """
        old, new = cases[0].calls[0].weights, cases[0].calls[1].weights
        asyncio.run(_load(url, weights[old]))
        config = self._config([self._task(case, 0) for case in cases], url, 0)
        config = dataclasses.replace(config, max_concurrency=12, groups_per_shard=1)

        async def both() -> None:
            generated = asyncio.create_task(generate(config, lambda _: VllmEngine(url)))
            while not list(Path(config.out).glob("*.parquet")):
                await asyncio.sleep(0.02)
            await asyncio.to_thread(asyncio.run, _load(url, weights[new]))
            await generated

        asyncio.run(both())
        rows = {row["instance_id"]: row for row in rollout_io.read(config.out).to_pylist()}
        for case in cases:
            case.answers.append(rows[case.name])

    def settle_swaps(self, cases: Sequence[Case], scorer: Scorer) -> None:
        """Find the first token of each response that the new weights sampled.

        It is the first token whose recorded log-probability the old weights do not reproduce. A
        case is marked incomplete if this token is too close to an end of the response.
        """
        for case in sorted(cases, key=lambda case: case.calls[0].weights):
            row = case.answers[0]
            exact = scorer.logprobs(case.calls[0].weights, row).numpy()
            differs = abs(exact - np.array(row["rollout_logprobs"])) > EXACT
            at, size = int(differs.argmax()), len(differs)
            case.is_complete = bool(differs.any()) and 5 <= at <= size - 5
            if case.is_complete:
                parts = [{**row, **{n: row[n][i] for n in PER_TOKEN}} for i in _halves(at, size)]
                case.answers = parts

    def _task(self, case: Case, number: int) -> dict[str, Any]:
        call = case.calls[number]
        prompt = [{"role": "user", "content": call.text or "-"}]
        ids = None
        if number:
            ids = self._continued(case, call)
        elif call.variant is not None and call.engine_has_variant:
            ids = self.rendered(call, call.variant)
        sampling = call.sampling
        return {"instance_id": case.name, "prompt": prompt, "ids": ids, "sampling": sampling}

    def _continued(self, case: Case, call: Call) -> list[int]:
        before = case.answers[-1]
        ids = before["prompt_token_ids"] + before["response_ids"]
        if call.text is None:
            return ids
        end = self.tokenizer.eos_token_id
        ids += [end] * (ids[-1] != end)
        text = f"\n<|im_start|>user\n{call.text}<|im_end|>\n<|im_start|>assistant\n"
        return ids + self._encoded(text)

    def _answered(self, case: Case, number: int, row: dict[str, Any]) -> None:
        following = case.calls[number + 1 : number + 2]
        case.answers.append(row)
        if following and following[0].text is None and row["stop_reason"] != "length":
            case.is_complete = False  # the response ended before the swap

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode([text], ["call"])[0]

    def rendered(self, call: Call, variant: str) -> list[int]:
        """Render the prompt of a case's first call in a way that differs from the chat template."""
        text = self.tokenizer.render([_user(call.text)], generation_prompt=True)
        system = text[: text.index("<|im_start|>user")]
        changed = {
            "no_system": text.removeprefix(system),
            "other_system": f"<|im_start|>system\n{OTHER_SYSTEM}<|im_end|>\n"
            + text.removeprefix(system),
            "no_generation_prompt": text.removesuffix("<|im_start|>assistant\n"),
            "no_newlines": text.replace("<|im_end|>\n", "<|im_end|>"),
            "double_bos": "<|im_start|>" + text,
        }[variant]
        assert changed != text
        return self._encoded(changed)

    def rows(self, case: Case) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the row and the label of each step of a case."""
        steps: list[tuple[Call, dict[str, Any], dict[str, Any]]] = []
        said: list[dict[str, str]] = []
        for call, answer in zip(case.calls, case.answers, strict=True):
            if call.text is None:
                _, row, label = steps[-1]
                label |= {"position": len(row["response_ids"]), "weights_after": call.weights}
                for name in PER_TOKEN:
                    row[name] = row[name] + answer[name]
                if answer["response_text"] != row["response_text"]:
                    row["response_text"] += answer["response_text"]
                row["stop_reason"] = answer["stop_reason"]
                continue
            said.append(_user(call.text))
            row = {name: answer.get(name) for name in COLUMNS}
            row["messages"] = json.dumps(said)
            label = {"weights": call.weights, "position": None, "weights_after": None}
            steps.append((call, row, label))
            said.append({"role": "assistant", "content": answer["response_text"]})
        for index, (call, row, label) in enumerate(steps):
            self._fill(case, call, row, index, is_last=index + 1 == len(steps))
            yield row, self._label(case, call, row) | label

    def _fill(
        self, case: Case, call: Call, row: dict[str, Any], index: int, *, is_last: bool
    ) -> None:
        row |= {"step_index": index, "is_last_step": is_last, "policy_version": call.label}
        row |= {"instance_id": case.name, "trajectory_id": f"{case.name}_0", "repetition_id": 0}
        row["loss_mask"] = [True] * len(row["response_ids"])
        row["reward"] = float(is_last and int(case.name[1:]) % 3 == 0)
        row |= call.says
        if call.shift:
            row["rollout_logprobs"] = shifted(row["rollout_logprobs"], call.shift)
        if call.variant is not None:
            ids = self._encoded(self.tokenizer.render([_user(call.text)], generation_prompt=True))
            if not call.engine_has_variant:
                assert row["prompt_token_ids"] == ids
                ids = self.rendered(call, call.variant)
            row["prompt_token_ids"] = ids

    def _label(self, case: Case, call: Call, row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "dataset": case.dataset,
            "trajectory_id": row["trajectory_id"],
            "step_index": row["step_index"],
            "num_tokens": len(row["response_ids"]),
            "fault": call.fault,
            "labelled_version": call.label,
            "temperature": call.sampling["temperature"],
            "labelled_temperature": row["temperature"],
            "top_p": call.sampling["top_p"],
            "top_k": call.sampling["top_k"],
            "shift": call.shift or None,
            "variant": call.variant,
            "engine_has_variant": call.engine_has_variant if call.variant else None,
        }


def shifted(values: Sequence[float], shift: int) -> list[float]:
    """Shift log-probabilities by a number of positions; vacated positions become 0.

    Example:
        >>> shifted([-1.0, -2.0, -3.0], 1), shifted([-1.0, -2.0, -3.0], -1)
        ([0.0, -1.0, -2.0], [-2.0, -3.0, 0.0])
    """
    free = [0.0] * abs(shift)
    return [*free, *values[:-shift]] if shift > 0 else [*values[-shift:], *free]


def _halves(at: int, size: int) -> tuple[slice, slice]:
    return slice(0, at), slice(at, size)


def _user(text: str | None) -> dict[str, str]:
    return {"role": "user", "content": text or ""}


async def _load(url: str, path: str) -> None:
    async with VllmEngine(url) as engine:
        await engine.load_weights(path, policy_version=0)


def write(cases: Sequence[Case], sampler: Sampler, out: Path) -> pl.DataFrame:
    """Write the datasets in `out`, and return the labels."""
    labels: list[dict[str, Any]] = []
    names = sorted({case.dataset for case in cases})
    for name in names:
        chosen = [case for case in cases if case.dataset == name and case.is_complete]
        random.Random(len(chosen)).shuffle(chosen)
        rows = []
        for number, case in enumerate(chosen):
            case.name = f"t{number:05d}"
            for row, label in sampler.rows(case):
                rows.append(row)
                labels.append(label)
        schema = pa.schema([pa.field(n, COLUMN_BY_NAME[n].type) for n in COLUMNS])
        table = pa.Table.from_pylist(rows, schema)
        if name == "merged":
            table = merge_table(table)
        some = rollout_io.read_metadata(next(sampler.folder.glob("part*[0-9]")))
        metadata = dataclasses.replace(
            some, made_by=(), logprobs_mode="raw" if name == "raw" else "processed"
        )
        with RolloutWriter(out / name, metadata=metadata) as writer:
            writer.write(table)
        rollout_io.validate(out / name)
        print(f"{name}: {len(chosen)} trajectories, {table.num_rows} rows", flush=True)
    return pl.DataFrame(labels, infer_schema_length=None)


def train(
    out: Path, url: str, model: str, *, seed: int, iterations: int, rate: float, rank: int | None
) -> Path:
    """Train a policy on one-digit additions with `rollouts rl`, and keep every version."""
    tasks = out.parent / "tasks"
    write_tasks(tasks)
    lora = [] if rank is None else [f"model.lora_rank={rank}"]
    config = rl.load_rl_config(
        "examples/addition.toml",
        [
            f"model.path={model}",
            f"loop.tasks={tasks}/train.jsonl",
            f"evaluate.tasks={tasks}/held_out.jsonl",
            "evaluate.every_iterations=1000",
            "evaluate.group_size=1",
            f"run.out={out}",
            f"loop.num_iterations={iterations}",
            f"loop.keep_weights={iterations}",
            f"run.seed={seed}",
            f"optimizer.learning_rate={rate}",
            "run.keep_checkpoints=1",
            "generate.engine=vllm",
            f'generate.urls=["{url}"]',
            *lora,
        ],
    )
    rl.run(config)
    return out


def untied(source: Path, target: Path) -> str:
    """Copy a model, and store its output embeddings as separate weights.

    vLLM on a CPU packs the output layer when it starts. If that layer shares its weights with the
    input embeddings, `reload_weights` does not pack it again (vLLM 0.32 logs "ParallelLMHead: Failed
    to load weights"), and the server samples with a mixture of old and new weights.
    """
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    if config["tie_word_embeddings"]:
        (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        file = target / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, file, {"format": "pt"})
    return str(target)


def round_weights(source: Path, target: Path, kind: str) -> str:
    """Copy a model with its matrices rounded to bfloat16, or to 8-bit integers scaled per row."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("adapter"))
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({n: _rounded(t, kind) for n, t in tensors.items()}, file, {"format": "pt"})
    return str(target)


def _rounded(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "bf16":
        return tensor.bfloat16().to(tensor.dtype)
    if tensor.dim() != 2:
        return tensor
    step = (tensor.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return (tensor / step).round() * step


@contextmanager
def server(
    model: str, python: str, log: Path, *arguments: str, dtype: str = "float32"
) -> Iterator[str]:
    """Run a vLLM server that can reload its weights."""
    with VllmServer(
        model,
        python=python,
        log=log,
        arguments=[
            *("--served-model-name", "smollm2", "--max-model-len", "2048", "--dtype", dtype),
            # Room for all prompts of a step: vLLM 0.32 on a CPU crashes if it splits a seeded one.
            *("--enforce-eager", "--max-num-batched-tokens", "16384", *arguments),
        ],
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    ) as running:
        yield running.url


def versions_of(run: Path, model: str) -> dict[str, str]:
    """Return the model directory of each version of a run, starting with the initial model."""
    found = {path.name.removeprefix("version_"): str(path) for path in (run / "weights").iterdir()}
    return {"0": model} | {key: found[key] for key in sorted(found, key=int)}


class Scorer:
    """Computes log-probabilities with Transformers, independently of the audit."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = paths
        self._key, self._model = "", None

    @torch.no_grad()
    def logprobs(self, key: str, row: Mapping[str, Any], temperature: float = 1.0) -> torch.Tensor:
        """Compute the log-probabilities of a row's response ([R] nats)."""
        if key != self._key:
            self._model = AutoModelForCausalLM.from_pretrained(self.paths[key]).float().eval()
            self._key = key
        ids = torch.tensor([[*row["prompt_token_ids"], *row["response_ids"]]])
        size = len(row["response_ids"])
        logits = self._model(ids).logits[0, -size - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, -size:, None])[:, 0]


def distances(table: pl.DataFrame, labels: pl.DataFrame, scorer: Scorer) -> dict[str, Any]:
    """Measure how far log-probabilities are from the sampling version's, in nats.

    On clean rows, the log-probabilities reported by the engine, under the previous version, and
    under the next version are compared with the sampling version's.
    """
    clean = labels.filter(
        pl.col("fault") == "clean",
        pl.col("dataset") == "steps",
        pl.col("temperature") == 1.0,
        pl.col("top_p") == 1.0,
        pl.col("top_k").is_null(),
    )
    joined = clean.join(table, on=["trajectory_id", "step_index"])
    keys = list(scorer.paths)
    found: dict[str, Any] = {}
    rows = {key: joined.filter(pl.col("weights") == key).head(25).rows(named=True) for key in keys}
    own, near = {}, defaultdict(list)
    for i, key in enumerate(keys):
        for other in keys[max(0, i - 1) : i + 2]:
            for row in rows[other]:
                values = scorer.logprobs(key, row)
                if other == key:
                    own[key, row["trajectory_id"]] = values
                else:
                    near[other, key].append((row["trajectory_id"], values))
    engine = [
        (own[key, row["trajectory_id"]] - torch.tensor(row["rollout_logprobs"])).abs()
        for key in keys
        for row in rows[key]
    ]
    found["engine"] = _summary(torch.cat(engine))
    for (sampled, other), pairs in sorted(near.items()):
        differences = [(own[sampled, name] - values).abs() for name, values in pairs]
        found[f"sampled by {sampled}, scored by {other}"] = _summary(torch.cat(differences))
    return found


def _summary(values: torch.Tensor) -> dict[str, float]:
    quantiles = {f"q{int(100 * q)}": float(values.quantile(q)) for q in (0.1, 0.5, 0.9, 0.99)}
    return {"mean": float(values.mean())} | quantiles | {"num_tokens": len(values)}
