"""A report is one file that holds the answers about every trajectory of its selection."""

import base64
import json
import re
import zlib

import polars as pl
import pyarrow as pa
import pytest

from pipelines.view.bundle_files import Bundle
from pipelines.view.export import export, key_of
from rollout_io import scan
from schemas.errors import RolloutError
from tests.helpers.view_helpers import Asked, bundle_in

REPORT = '<html><head></head><body><script id="answers">__ANSWERS__</script></body></html>'


@pytest.fixture
def bundle(tmp_path):
    bundle_in(tmp_path / "bundle")
    (tmp_path / "bundle" / "report.html").write_text(REPORT)
    return Bundle.read(tmp_path / "bundle")


def answers_in(path):
    """The answers of a report, by key."""
    found = re.search(r'<script id="answers">(.*)</script>', path.read_text())
    stored = json.loads(found[1])
    return {
        key: zlib.decompress(base64.b64decode(value), wbits=-zlib.MAX_WBITS)
        for key, value in stored.items()
    }


def test_the_file_answers_about_every_trajectory_of_the_selection(ask, bundle, shop, tmp_path):
    out = tmp_path / "report.html"
    told = export(ask.sources, bundle, str(out), where="reward > 0", limit=5)
    assert told.startswith("10 trajectories, ")  # five of each dataset
    answers = answers_in(out)
    kept = (
        scan(shop)
        .filter(pl.col("reward") > 0)
        .collect()["trajectory_id"]
        .unique(maintain_order=True)[:5]
    )
    root = "/api/datasets/d0"
    window = answers[key_of(f"{root}/trajectories", offset=0, limit=5)]
    table = pa.ipc.open_stream(window).read_all()
    assert table.column("trajectory_id").to_pylist() == kept.to_list()
    assert json.loads(answers["/api/sources"])["export"] == {
        "where": "reward > 0",
        "limit": 5,
        "num_trajectories": {"d0": 5, "d1": 5},
    }
    num_tokens = 0
    for row in (
        scan(shop).filter(pl.col("trajectory_id").is_in(kept.implode())).collect().to_dicts()
    ):
        key = {name: row[name] for name in ("trajectory_id", "step_index")}
        tokens = pa.ipc.open_stream(answers[key_of(f"{root}/tokens", **key)]).read_all()
        ids = row["prompt_token_ids"] + row["response_ids"]
        assert tokens.column("id").to_pylist() == ids
        num_tokens += len(ids)
    assert num_tokens > 1000
    for name in kept:
        assert key_of(f"{root}/conversation", trajectory_id=name) in answers
        assert key_of(f"{root}/tree", trajectory_id=name) in answers
        assert key_of(f"{root}/group", instance_id=name.rpartition("_")[0]) in answers
    assert "/api/diff?a=d0&b=d1" in answers
    asked = Asked.decoded(ask.api.answer(f"{root}/conversation?trajectory_id={kept[0]}"))
    assert json.loads(answers[f"{root}/conversation?trajectory_id={kept[0]}"]) == asked


def test_nothing_selected_is_an_error_and_writes_nothing(ask, bundle, tmp_path):
    out = tmp_path / "report.html"
    with pytest.raises(RolloutError, match="nothing_left"):
        export(ask.sources, bundle, str(out), where="reward > 5", limit=5)
    with pytest.raises(RolloutError, match="output_file"):
        export(ask.sources, bundle, str(tmp_path), where=None, limit=5)
    assert not out.exists()


def test_a_page_that_is_not_built_is_an_error(tmp_path):
    with pytest.raises(RolloutError, match="view_bundle") as caught:
        Bundle.read(tmp_path)
    assert "make view" in caught.value.hint
