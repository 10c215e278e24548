"""A report is one file that holds the answers about every trajectory of its selection."""

import base64
import hashlib
import json
import re

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from pipelines.view.export import Packing, export, inlined, key_of
from rollout_io import scan
from schemas.errors import RolloutError
from tests.helpers.report_helpers import answers_in, bits_of, large_run
from tests.helpers.view_helpers import Asked, bundle_in


@pytest.fixture
def bundle(tmp_path):
    return bundle_in(tmp_path / "bundle")


@pytest.mark.slow
def test_the_file_answers_about_every_trajectory_of_the_selection(ask, bundle, shop, tmp_path):
    out = tmp_path / "report.html"
    told = export(ask.sources, bundle, str(out), where="return > 0", limit=5)
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
    assert window.column("trajectory_id").to_pylist() == kept.to_list()
    assert json.loads(answers["/api/sources"])["export"] == {
        "where": "return > 0",
        "limit": 5,
        "num_trajectories": {"d0": 5, "d1": 5},
    }
    num_tokens = 0
    for row in (
        scan(shop).filter(pl.col("trajectory_id").is_in(kept.implode())).collect().to_dicts()
    ):
        key = {name: row[name] for name in ("trajectory_id", "step_index")}
        tokens = answers[key_of(f"{root}/tokens", **key)]
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
        export(ask.sources, bundle, str(out), where="return > 5", limit=5)
    with pytest.raises(RolloutError, match="output_file"):
        export(ask.sources, bundle, str(tmp_path), where=None, limit=5)
    assert not out.exists()


@pytest.mark.slow
def test_a_report_of_200_trajectories_of_2000_tokens_fits_into_5_mb(
    tmp_path, tokenizer, smollm2_dir, bundle
):
    """The page itself, some 0.4 MB, is counted by its sources, whether it is built or not."""
    run = large_run(tmp_path, tokenizer)
    ask, out = Asked(run, tokenizer=str(smollm2_dir)), tmp_path / "report.html"
    export(ask.sources, bundle, str(out), where=None, limit=200)
    assert out.stat().st_size < 4_000_000
    answers = answers_in(out)
    rng, recorded, num_tokens = np.random.default_rng(1), 0, 0
    keys = [key for key in answers if "/tokens?" in key]
    assert len(keys) == 232  # four groups of eight were recorded
    for key in [key for key in keys if "run=" in key][:6] + rng.permutation(keys)[:20].tolist():
        served = pa.ipc.open_stream(ask.api.answer(key).body).read_all()
        assert bits_of(answers[key]) == bits_of(served)
        recorded += "run=r0" in key
        num_tokens += served.num_rows
    assert recorded >= 6
    assert num_tokens == 26 * 2000


def test_a_report_allows_its_own_script_and_style_only(bundle):
    """The script holds the end of a script as text; its hash is of the text as it is inlined."""
    page = inlined(bundle, ["answers"])
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert (script, style) == (r"console.log('<\/script>')", "body { color: black }")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for name, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "./assets" not in page


def test_packing_keeps_every_bit(bundle, tmp_path):
    """NaN with a payload, infinities, -0.0, subnormal numbers, nulls, and columns that follow none."""
    odd = np.array([0x7FC00001, 0xFF800000, 0x7F800000, 0x80000000, 1, 0x7F7FFFFF], np.uint32)
    rng = np.random.default_rng(2)
    num = 3000
    columns = {
        name: rng.permutation(np.concatenate([np.resize(odd, num // 2), bits])).view(np.float32)
        for name in ("advantage", "old_logprob", "logprob", "importance_weight", "loss")
        for bits in [rng.integers(0, 2**32, num - num // 2, dtype=np.uint32)]
    }
    table = pa.table(
        {
            **{name: pa.array(v, mask=rng.random(num) < 0.1) for name, v in columns.items()},
            "wide": rng.integers(0, 2**63, num, dtype=np.int64).view(np.float64),
            "small": rng.integers(-(2**15), 2**15, num).astype(np.int16),
            "flag": rng.random(num) < 0.5,
            "text": [f"{i}\u00e9" for i in range(num)],
            "nothing": pa.nulls(num, pa.float32()),
        }
    ).replace_schema_metadata({"total": "3"})
    packing = Packing()
    packing.add_table("/a", {("all", "1"): table})
    packing.add_table("/b", {("all", "2"): table.slice(5, 7)})
    packing.add_table("/c", {("all", "1"): table})
    packing.add_table("/none", {("none", ""): table.slice(0, 0)})
    packing.add_text("/d", b"{}")
    out = tmp_path / "report.html"
    out.write_text(inlined(bundle, packing.blobs()))
    found = answers_in(out)
    assert found["/d"] == b"{}"
    for key, expected in {"/a": table, "/b": table.slice(5, 7), "/c": table}.items():
        assert bits_of(found[key]) == bits_of(expected)
    assert found["/none"].schema.names == table.schema.names
