"""Small tables for drift: steps of one trajectory from their ids."""

import pyarrow as pa

from pipelines.drift_diagnosis import diagnose


def steps_of(prompts, responses, **columns):
    num = len(prompts)
    table = pa.table(
        {
            "trajectory_id": ["a_0"] * num,
            "step_index": pa.array(range(num), pa.int32()),
            "prompt_token_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
        }
    )
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values, pa.string()))
    return table


def breaks_of(table, tokenizer=None):
    return diagnose(table, tokenizer).breaks.to_dicts()


def only_break(table, tokenizer=None):
    (found,) = breaks_of(table, tokenizer)
    return found
