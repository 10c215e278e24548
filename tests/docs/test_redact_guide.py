"""The guide removes what it says from a dataset, with the commands that it shows."""

import socket

import pytest

import rollout_io
from tests.conftest import ROOT
from tests.helpers.guide_helpers import check_outputs, follow, served


@pytest.mark.slow
@pytest.mark.model
def test_the_guide_redacts_a_dataset(smollm2_dir, tmp_path):
    places = (("examples/shop", str(ROOT / "examples" / "shop")),)
    with served(smollm2_dir) as url, socket.create_server(("127.0.0.1", 0)) as free:
        ports = (("8100", str(free.getsockname()[1])),)
        free.close()
        printed = follow(
            "redact.md", tmp_path, model=smollm2_dir, places=(*places, *ports), url=url
        )
    check_outputs("redact.md", printed)
    (recorded,) = rollout_io.read(tmp_path / "runs" / "recorded").to_pylist()
    assert "271828" not in str(recorded)
    assert len(recorded["response_ids"]) == len(recorded["redacted"]) > 0
    rows = rollout_io.read(tmp_path / "runs" / "clean").to_pylist()
    assert "How many pens is" not in str(rows)
    assert "[REDACTED_" in rows[0]["messages"]
