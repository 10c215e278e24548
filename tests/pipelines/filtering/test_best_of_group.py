"""The best attempts of each group, as `filter --best` keeps and `export --select best` writes them."""

import math

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.exporting.pairs import selected
from pipelines.filters import best_of_group
from tests.helpers.examples import examples

RETURNS = st.sampled_from([None, math.nan, 0.0, 0.5, 1.0])


def best(attempts, num):
    """The positions of the `num` highest known returns of each group; the first of equal ones."""
    found = set()
    for name in "abc":
        known = [(-r, i) for i, (n, r) in enumerate(attempts) if n == name and r is not None]
        found |= {i for r, i in sorted(pair for pair in known if pair[0] == pair[0])[:num]}
    return found


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.tuples(st.sampled_from("abc"), RETURNS), min_size=1), st.integers(1, 3))
def test_filter_and_export_choose_the_first_of_the_highest_known_returns(attempts, num):
    schema = {"instance_id": pl.String, "return": pl.Float64}
    returns = pl.DataFrame(attempts, schema, orient="row")
    kept = returns.select(~best_of_group(num).drops).to_series()
    assert {*kept.arg_true()} == best(attempts, num)
    exported = selected(returns, "best")["reason"].is_null()
    assert {*exported.arg_true()} == best(attempts, 1)
