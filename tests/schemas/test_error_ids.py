"""The catalogue of error ids, and with it docs/errors.md, is what the code raises."""

import re

import pytest

from schemas import RULES
from schemas.rules import error_ids
from tests.conftest import ROOT
from tests.helpers.error_sites import error_sites


@pytest.fixture(scope="module")
def sites():
    return error_sites(ROOT, frozenset(RULES))


@pytest.mark.slow
def test_every_id_that_is_raised_is_in_the_catalogue(sites):
    assert len(sites) > 400
    assert {(i, site.where) for site in sites for i in site.ids if i not in error_ids()} == set()
    assert [site.where for site in sites if not site.ids] == []


@pytest.mark.slow
def test_every_id_of_the_catalogue_is_raised(sites):
    assert error_ids().keys() - {i for site in sites for i in site.ids} == set()


@pytest.mark.slow
def test_every_error_is_of_a_kind_that_the_catalogue_says(sites):
    raised = {error for site in sites for error in site.raised}
    known = {(kind.__name__, i) for i, entry in error_ids().items() for kind in entry.kinds}
    assert raised == known


def test_causes_and_fixes_are_one_sentence_each():
    for name, entry in error_ids().items():
        for text in (entry.cause, entry.fix):
            assert re.fullmatch(r"[A-Z`](?:(?!\. |  )[^\n])*\.", text), name
