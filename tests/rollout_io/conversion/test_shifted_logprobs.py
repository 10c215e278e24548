"""A conversion says if the log-probabilities look shifted by one token."""

import pytest

from rollout_io import convert
from rollout_io.conversion.plan import Keywords
from tests.helpers.conversion_helpers import SHOP, call, write

CALLS = Keywords(format="calls")


def logged(session, ids, logprobs):
    line = call(session, *ids)
    content = [{"token": str(i), "logprob": value} for i, value in zip(ids, logprobs, strict=True)]
    line["response"]["choices"][0]["logprobs"] = {"content": content}
    return line


def said(tmp_path, name, lines):
    out = tmp_path / name
    return convert(write(tmp_path / f"{name}.jsonl", *lines), out, **CALLS).summary.text(str(out))


def test_a_zero_before_all_rows_is_named_with_the_verb_that_checks_it(tmp_path):
    lines = [logged(f"a/{n}", [7 + n, 8, 9], [0.0, -1.0, -0.5]) for n in range(6)]
    text = said(tmp_path, "shifted", lines)
    assert "the first log-probability of 6 of 6 rows is 0.0" in text
    assert "rollouts audit" in text


@pytest.mark.parametrize(
    "row",
    [
        lambda n: ([7 + n, 8, 9], [-0.1, -1.0, -0.5]),  # as they should be
        lambda n: ([7, 8 + n, 9], [0.0, -1.0, -0.5]),  # a template's first token, which is certain
        lambda n: ([7 + n, 8, 9], [0.0, 0.0, 0.0]),  # greedy sampling of certain tokens
        lambda n: ([7 + n, 8, 9], [0.0 if n < 3 else -0.1, -1.0, -0.5]),  # half of the rows
    ],
)
def test_values_that_an_engine_returns_are_not_called_shifted(tmp_path, row):
    lines = [logged(f"a/{n}", *row(n)) for n in range(6)]
    assert "shifted" not in said(tmp_path, "sound", lines)


def test_the_logs_of_a_real_engine_are_not_called_shifted(tmp_path):
    assert "shifted" not in convert(SHOP, tmp_path / "ds", **CALLS).summary.text("ds")
