from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from rollout_io import read_log
from rollout_io.conversion.plan import Keywords
from schemas import check
from schemas.columns import metrics_dict
from schemas.errors import RolloutError

Record = dict[str, Any]
GOLDEN = "hello-world-context-summarization.trajectory"
KEPT = ("reward", "error", "stop_reason", "temperature", "rollout_logprobs", "metrics", "agent")


def element(prompts: list[list[int]], responses: list[list[int]], **fields: Any) -> Record:
    logprobs = [[-0.5] * len(response) for response in responses]
    lists = {"prompt_token_ids": prompts, "completion_token_ids": responses, "logprobs": logprobs}
    return lists | fields


def failure(kind: str, message: str = "it took too long") -> Record:
    return {
        "exception_type": kind,
        "exception_message": message,
        "exception_traceback": "Traceback ...",
        "occurred_at": "2026-02-26T06:45:03",
    }


def agent_step(step_id: int, prompt: list[int], response: list[int], **fields: Any) -> Record:
    metrics = {
        "prompt_token_ids": prompt,
        "completion_token_ids": response,
        "logprobs": [-0.5] * len(response),
    }
    step = {"step_id": step_id, "source": "agent", "message": f"step {step_id}"}
    return step | {"metrics": metrics} | fields


def refers(step_id: int, *refs: Record, **fields: Any) -> Record:
    results = [{"source_call_id": None, "subagent_trajectory_ref": list(refs)}]
    step = {"step_id": step_id, "source": "system", "message": "compaction"}
    return step | {"observation": {"results": results}} | fields


def atif(*steps: Record, version: str = "1.7", name: str = "terminus-2", **fields: Any) -> Record:
    agent = {"name": name, "version": "2.0.0", "model_name": "m", "extra": {"temperature": 0.7}}
    return {"schema_version": f"ATIF-v{version}", "agent": agent, "steps": list(steps)} | fields


def write(path: Path, record: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def write_trial(job: Path, record: Record, trajectory: Record | None = None) -> Path:
    directory = job / record["trial_name"]
    write(directory / "result.json", record)
    write(directory / "config.json", record["config"] | {"trial_name": record["trial_name"]})
    if trajectory is not None:
        write(directory / "agent" / "trajectory.json", trajectory)
    return directory


def read_harbor(paths, rewards=None, **options) -> pa.Table:
    choices = Keywords(format="harbor", rewards=rewards and str(rewards), **options)
    return read_log(paths, **choices)


def convert(*paths: Path, rewards: Path | None = None, **options: str) -> pl.DataFrame:
    table = read_harbor(paths, rewards, **options)
    assert check(table).is_empty()
    if "metrics" in table.column_names:
        index = table.column_names.index("metrics")
        texts = [m and json.dumps(metrics_dict(m)) for m in table.column("metrics").to_pylist()]
        table = table.set_column(index, "metrics", pa.array(texts, pa.string()))
    frame = pl.DataFrame(pl.from_arrow(table))
    absent = [pl.lit(None).alias(name) for name in KEPT if name not in frame.columns]
    return frame.with_columns(absent)


def refusal(*paths: Path, rewards: Path | None = None) -> RolloutError:
    with pytest.raises(RolloutError) as caught:
        read_harbor(paths, rewards)
    return caught.value
