"""Small datasets of attempts, and their exports."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import rollout_io


def attempts(*given, **columns):
    """A table of trajectories: (instance, return, [(prompt, response), ...]), a step per pair."""
    rows, seen = [], {}
    for instance, value, steps in given:
        number = seen[instance] = seen.get(instance, -1) + 1
        for index, (prompt, response, *mask) in enumerate(steps):
            is_last = index == len(steps) - 1
            rows.append(
                {
                    "instance_id": instance,
                    "repetition_id": number,
                    "trajectory_id": f"{instance}_{number}",
                    "step_index": index,
                    "is_last_step": is_last,
                    "prompt_token_ids": prompt,
                    "response_ids": response,
                    "loss_mask": mask[0] if mask else [True] * len(response),
                    "token_source": "engine",
                    "reward": value if is_last or value is None else 0.0,
                }
            )
    kinds = {
        "repetition_id": pa.int32(),
        "step_index": pa.int32(),
        "prompt_token_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "reward": pa.float64(),
    }
    made = {name: pa.array([row[name] for row in rows], kinds.get(name)) for name in rows[0]}
    return pa.table(made | columns)


def write(path, *tables, layout="prefix"):
    """Write each table as a shard of one dataset."""
    for number, table in enumerate(tables):
        with rollout_io.RolloutWriter(path, layout=layout, append=number > 0) as writer:
            writer.write(table)
    return path


def exported(dataset, name, select=None, **options):
    """Export, and return the counts and the samples."""
    out = Path(dataset).parent / f"{name}.{len(list(Path(dataset).parent.iterdir()))}"
    done = rollout_io.export(dataset, out, name, select=select, **options)
    if name.endswith(("_tokens", "_images")):
        return done, pq.read_table(out).to_pylist()
    return done, [json.loads(line) for line in out.read_text().splitlines()]
