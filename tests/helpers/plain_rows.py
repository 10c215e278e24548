"""What the rows of a trajectory must hold, read from its log by plain json code.

`expected(name, rows)` finds the record that `rows` name as their source and says what each
row must hold. It shares no code with the adapters: a value that it cannot find where the format has
it is an error (KeyError, AssertionError, ...), so that a row with a made-up value cannot pass.
"""

import math

import numpy as np

from tests.helpers import plain_exact, plain_text
from tests.helpers.plain_said import SURROGATES
from tests.helpers.plain_values import Spoken

READERS = {**plain_exact.READERS, **plain_text.READERS}


def expected(name, rows):
    """What the rows of a trajectory must hold; None where there is no reader of the format."""
    return READERS[name](rows) if name in READERS else None


def differences(expected, rows, decode):
    """How rows differ from what they must hold."""
    rows = rows if any(row["response_ids"] for row in rows) else []
    is_failed = any(row.get("error") is not None for row in rows)
    if len(rows) != len(expected.steps) and not (is_failed or not rows):
        return [f"{len(rows)} rows, expected {len(expected.steps)}"]
    if expected.names is not None and rows and rows[0]["trajectory_id"] != expected.names:
        return [f"trajectory {rows[0]['trajectory_id']}, expected {expected.names}"]
    if is_failed:
        return []
    found = []
    for i, (row, step) in enumerate(zip(rows, expected.steps, strict=False)):
        compare = _text_differences if isinstance(step, Spoken) else _token_differences
        found += [f"row {i}: {text}" for text in compare(row, step, decode)]
    return found + _reward_differences(expected, rows)


def _token_differences(row, step, _):
    own = {
        "prompt_token_ids": step.prompt,
        "response_ids": step.response,
        "loss_mask": [True] * len(step.response) if step.mask is None else step.mask,
        "rollout_logprobs": None if step.logprobs is None else np.float32(step.logprobs).tolist(),
    }
    for name, wanted in own.items():
        if row.get(name) != wanted:
            yield f"{name} {row.get(name)!r:.200}, expected {wanted!r:.200}"


def _text_differences(row, step, decode):
    ids, mask = row["response_ids"], row["loss_mask"]
    text, whole = decode([*row["prompt_token_ids"], *ids]), SURROGATES.sub("\ufffd", step.text)
    if text.rstrip("\n") != whole.rstrip("\n"):
        yield f"text {text!r}, expected {whole!r}"
    if step.answers is not None:
        wanted = [SURROGATES.sub("\ufffd", answer) for answer in step.answers]
        spans = [(s["start"], s["length"]) for s in row["segments"]]
        said = [decode(ids[start : start + length]) for start, length in spans]
        # a line break of the header may be one token with a space that the answer begins with
        if [text.lstrip() for text in said] != [text.lstrip() for text in wanted]:
            yield f"answers {said!r}, expected {wanted!r}"
        trained = [i for start, length in spans for i in range(start, start + length)]
        if [i for i, trains in enumerate(mask) if trains] != trained:
            yield "a mask other than the answers"


def _reward_differences(expected, rows):
    own = [getattr(step, "reward", None) for step in expected.steps]
    if not rows or any(isinstance(value, bool) for value in [*own, expected.outcome]):
        return [] if not rows else ["a reward of type bool"]
    outcome = own[-1] if expected.outcome is None else expected.outcome
    own[-1] = outcome
    if outcome is not None:
        own = [0.0 if value is None else value for value in own]
    found = [row.get("reward") for row in rows]
    same = [
        a == b or (a is not None and b is not None and math.isclose(a, b))
        for a, b in zip(found, own, strict=True)
    ]
    return [] if all(same) else [f"rewards {found}, expected {own}"]
