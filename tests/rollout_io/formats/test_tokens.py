import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.formats.parsing.tokens import logprob_array, num_ids, parse_ids, strict_ids
from schemas.errors import RolloutError

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")])


def test_the_example_of_parse_ids():
    ids, lengths = parse_ids([b"[1, 33]", b"[1, 33, 37]", b"[]"])
    assert (ids.tolist(), lengths.tolist()) == ([1, 33, 1, 33, 37], [2, 3, 0])


@st.composite
def growing_lists(draw):
    """Lists that often begin with the one before, as prompts do."""
    lists, current = [], []
    for more, anew in draw(st.lists(st.tuples(IDS, st.booleans()), max_size=8)):
        current = list(more) if anew else current + more
        lists.append(current)
    return lists


@given(growing_lists(), SEPARATORS)
def test_lists_parsed_together_are_those_that_json_reads(lists, separators):
    texts = [json.dumps(ids, separators=separators).encode() for ids in lists]
    ids, lengths = parse_ids(texts)
    assert ids.dtype == np.int32
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] == lists or not lists
    assert [num_ids(text) for text in texts] == lengths.tolist()


BAD = ["[1.5]", "[1, 2.0]", "[[1], [2]]", '["1"]', "[null]", "[true]", "{}", "1", '"[1]"', "[1e3]"]
BAD += ["[2147483648]", "[-4294967295]", f"[{10**30}]", "[1, {}]", "[[]]", "[-1.5]", "[{}, 1]"]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_list_of_ids_is_refused_together_and_named_alone(bad):
    extended = f"[1, {bad[1:]}" if bad.startswith("[") else bad
    for texts in ([bad], ["[1]", bad], [bad, "[1]"], ["[1]", extended]):
        with pytest.raises(ValueError, match=r"list|number|unmatched"):
            parse_ids([text.encode() for text in texts])
    with pytest.raises(RolloutError, match=r"record_type|token_range"):
        strict_ids(bad.encode(), "prompt", "a.jsonl:1")


@pytest.mark.parametrize(
    ("value", "rule"), [(-1e300, "logprobs_finite"), (1e300, "logprobs_nonpositive")]
)
def test_a_log_probability_beyond_32_bits_is_refused_by_name_without_a_warning(value, rule):
    with pytest.raises(RolloutError, match=rule):
        logprob_array([-0.5, value], 2, "a.jsonl:1")
