"""A trajectory of two steps with pictures at their tokens, stored in each way that a dataset has."""

import io

import pyarrow as pa
from PIL import Image

import rollout_io
from pipelines.merging.merge import merge_table
from rollout_io.dataset.blobs import Blobs
from schemas.columns import arrow_schema

SIZE = (160, 120)
PAD = 9
FIRST = [1, 7, *[PAD] * 60, 2, 5]
SECOND = [*FIRST, 3, 4, 6, *[PAD] * 40, 8, 11]
MISSING = {"sha256": f"sha256:{'a' * 64}", "start": 67, "length": 40}
"""A picture that the store does not have."""
WAYS = ("full", "prefix", "merged")


def picture():
    """A PNG with a red and a blue half."""
    image = Image.new("RGB", SIZE, "#c33")
    image.paste("#36c", (SIZE[0] // 2, 0, *SIZE))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_steps(path, way):
    """Write the two steps, or the row that they merge into; returns the entry of the stored picture."""
    entry = {"sha256": Blobs.of(path).add(picture()), "start": 2, "length": 60}
    document = {"sha256": None, "start": None, "length": None}
    steps = [(FIRST, [3], [entry]), (SECOND, [12, 13], [entry, document, MISSING])]
    rows = [
        {
            "instance_id": "a",
            "repetition_id": 0,
            "trajectory_id": "a_0",
            "step_index": index,
            "is_last_step": index == 1,
            "prompt_token_ids": prompt,
            "response_ids": response,
            "loss_mask": [True] * len(response),
            "token_source": "engine",
            "pictures": pictures,
        }
        for index, (prompt, response, pictures) in enumerate(steps)
    ]
    table = pa.Table.from_pylist(rows, schema=arrow_schema(tuple(rows[0])))
    if way == "merged":
        table = merge_table(table)
        assert table.num_rows == 1
    with rollout_io.RolloutWriter(path, layout="prefix" if way == "prefix" else "full") as writer:
        writer.write(table)
    return entry
