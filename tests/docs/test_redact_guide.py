"""The guide removes what it says from a dataset, with the commands that it shows."""

import pytest

import rollout_io
from tests.conftest import ROOT
from tests.helpers.guide_helpers import check_outputs, follow


@pytest.mark.slow
@pytest.mark.model
def test_the_guide_redacts_a_dataset(smollm2_dir, tmp_path):
    places = (("examples/shop", str(ROOT / "examples" / "shop")),)
    printed = follow("redact.md", tmp_path, model=smollm2_dir, places=places)
    check_outputs("redact.md", printed)
    rows = rollout_io.read(tmp_path / "runs" / "clean").to_pylist()
    assert "How many pens is" not in str(rows)
    assert "[REDACTED_" in rows[0]["messages"]
