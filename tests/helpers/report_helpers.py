"""Runs as large as a report may be, and the answers inside a report, read without the page."""

import base64
import json
import re
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rollout_io
from rollout_io import RolloutWriter
from rollout_io.dataset.trajectory_facts import with_stored_digest
from schemas.metadata import DatasetMetadata
from schemas.ragged import Ragged, offsets_of
from schemas.records import token_record_path, token_record_schema
from tests.conftest import ROOT

GROUP_SIZE, NUM_TOKENS, NUM_PROMPT = 8, 2000, 400
EPSILON = 0.2


def lists(values, lengths, kind):
    return Ragged(values, offsets_of(lengths), np.ones(len(lengths), np.bool_)).to_arrow(kind)


def documented_ids(tokenizer):
    """The documentation as tokens."""
    texts = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
    return np.array(tokenizer.backend("\n".join(texts))["input_ids"], np.int32)


def large_run(folder, tokenizer, *, num=200, num_groups=(4,)):
    """Write a dataset of trajectories of 2,000 tokens, and a run that recorded updates on it.

    Prompts and responses are text that people wrote; log-probabilities, entropies and advantages
    are random float32.

    Args:
        folder: Where to write.
        tokenizer: Splits the text into tokens.
        num: Number of trajectories.
        num_groups: Groups that each update records; the default is that of `record_tokens`.
    """
    rng, text = np.random.default_rng(0), documented_ids(tokenizer)
    num_response = NUM_TOKENS - NUM_PROMPT

    def excerpt(size):
        at = int(rng.integers(0, len(text) - size))
        return text[at : at + size]

    prompts = [excerpt(NUM_PROMPT) for _ in range(-(-num // GROUP_SIZE))]
    prompt = np.concatenate([prompts[i // GROUP_SIZE] for i in range(num)])
    response = np.concatenate([excerpt(num_response) for _ in range(num)])
    sampled = -rng.exponential(0.4, len(response)).astype(np.float32)
    groups = [f"task-{i // GROUP_SIZE}" for i in range(num)]
    names = [f"{group}_{i % GROUP_SIZE}" for i, group in enumerate(groups)]
    prompt_sizes, sizes = np.full(num, NUM_PROMPT), np.full(num, num_response)
    dataset = folder / "dataset"
    with RolloutWriter(dataset, metadata=DatasetMetadata(), checked=True) as writer:
        writer.write(
            pa.table(
                {
                    "instance_id": groups,
                    "repetition_id": (np.arange(num) % GROUP_SIZE).astype(np.int32),
                    "trajectory_id": names,
                    "step_index": np.zeros(num, np.int32),
                    "is_last_step": np.ones(num, np.bool_),
                    "prompt_token_ids": lists(prompt, prompt_sizes, pa.int32()),
                    "response_ids": lists(response, sizes, pa.int32()),
                    "loss_mask": lists(np.ones(len(response), np.bool_), sizes, pa.bool_()),
                    "rollout_logprobs": lists(sampled, sizes, pa.float32()),
                    "reward": rng.random(num).round(3),
                    "policy_version": np.zeros(num, np.int32),
                    "token_source": ["engine"] * num,
                }
            )
        )
    digests = with_stored_digest(rollout_io.scan(dataset)).select("row_digest").collect()
    digests = digests["row_digest"].to_numpy()
    run = folder / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"data": {"dataset": str(dataset)}}))
    for step, count in enumerate(num_groups, 1):
        chosen = rng.permutation(-(-num // GROUP_SIZE))[:count]
        rows = [i for i in range(num) if i // GROUP_SIZE in chosen]
        at = np.concatenate([np.arange(i * num_response, (i + 1) * num_response) for i in rows])
        write_records(run, step, str(dataset), rows, names, groups, digests, sampled[at], rng)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, len(num_groups) + 1):
            print(json.dumps({"global_step": step, "loss": float(rng.random())}), file=file)
    return run


def write_records(run, step, dataset, rows, names, groups, digests, sampled, rng):
    """Write what an update recorded: numbers that follow from each other as in a real one."""
    sizes = np.full(len(rows), len(sampled) // len(rows))
    noise = [rng.normal(0, spread, len(sampled)).astype(np.float32) for spread in (0.01, 0.05)]
    old = np.minimum(sampled + noise[0], 0).astype(np.float32)
    new = old if step == 1 else np.minimum(old + noise[1], 0).astype(np.float32)
    ratio = np.exp(new - old).astype(np.float32)
    advantage = np.repeat(rng.normal(0, 1, len(rows)).astype(np.float32), sizes)
    bound = np.clip(ratio, 1 - EPSILON, 1 + EPSILON).astype(np.float32)
    loss = np.maximum(-ratio * advantage, -bound * advantage).astype(np.float32)
    columns = {
        "loss_mask": np.ones(len(sampled), np.bool_),
        "advantages": advantage,
        "weights": np.full(len(sampled), 1 / len(sampled), np.float32),
        "old_logprobs": old,
        "logprobs": new,
        "importance_weights": ratio,
        "entropy": rng.exponential(0.6, len(sampled)).astype(np.float32),
        "losses": loss,
        "clipped": -ratio * advantage < -bound * advantage,
    }
    schema = token_record_schema()
    keys = {
        "dataset": [dataset] * len(rows),
        "instance_id": [groups[i] for i in rows],
        "trajectory_id": [names[i] for i in rows],
        "step_index": np.zeros(len(rows), np.int32),
        "row_digest": digests[rows],
    }
    found = {}
    for field in schema:
        if field.name in keys:
            found[field.name] = pa.array(keys[field.name], field.type)
        elif field.name in columns:
            found[field.name] = lists(columns[field.name], sizes, field.type.value_type)
        else:
            found[field.name] = pa.nulls(len(rows), field.type)
    path = token_record_path(run, step)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(found, schema=schema), path)


def answers_in(path):
    """The answers of a report, by key: JSON as bytes, Arrow as tables."""
    found = re.search(r'<script id="answers"[^>]*>(.*?)</script>', path.read_text(), re.DOTALL)
    blobs = [
        zlib.decompress(base64.b64decode(blob), wbits=-zlib.MAX_WBITS)
        for blob in json.loads(found[1])
    ]
    index = json.loads(blobs[0])
    answers = {key: blobs[n][begin:end] for key, (n, begin, end) in index["texts"].items()}
    numbers = {number for answer in index["tables"].values() for number, _, _ in answer["parts"]}
    whole = {number: pa.ipc.open_stream(blobs[number]).read_all() for number in numbers}
    for key, answer in index["tables"].items():
        columns = {}
        for number, begin, end in answer["parts"]:
            part = whole[number].slice(begin, end - begin)
            columns |= {name: plain(part.column(name)) for name in part.column_names}
        answers[key] = pa.table(columns).replace_schema_metadata(answer["totals"])
    return answers


def plain(column):
    """A column without a dictionary."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def bits_of(table):
    """Everything that a table holds: names, types, nulls and the bits of its values."""
    found = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        values = column.to_pylist()
        if pa.types.is_floating(column.type):
            wide = {16: "f2", 32: "f4", 64: "f8"}[column.type.bit_width]
            values = [None if v is None else np.array(v, wide).tobytes() for v in values]
        found.append((name, column.type, values))
    return found, table.schema.metadata
