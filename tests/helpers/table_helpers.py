"""A worked example that several test files use."""

import pyarrow as pa

from rollout_io import RolloutWriter

STEPS = {
    "instance_id": ["a", "a"],
    "repetition_id": pa.array([0, 0], pa.int32()),
    "trajectory_id": ["a_0", "a_0"],
    "step_index": pa.array([0, 1], pa.int32()),
    "is_last_step": [False, True],
    "prompt_token_ids": pa.array([[1, 2], [1, 2, 3, 9]], pa.list_(pa.int32())),
    "response_ids": pa.array([[3], [4]], pa.list_(pa.int32())),
    "loss_mask": [[True], [True]],
    "token_source": ["engine", "engine"],
}


def write_example(tmp_path):
    with RolloutWriter(tmp_path / "ds", layout="full") as writer:
        writer.write(pa.table(STEPS))
    return tmp_path / "ds" / "part-00000.parquet"


def seen_tokens(row):
    """What the model saw at each token: the id, and the picture and the offset in its span."""
    tokens = [(token,) for token in row["prompt_token_ids"] + row["response_ids"]]
    for picture in row.get("pictures") or ():
        sha256, start, length = picture["sha256"], picture["start"], picture["length"]
        if sha256 is not None and start is not None:
            for offset in range(length):
                tokens[start + offset] += (sha256, length, offset)
    return tokens
