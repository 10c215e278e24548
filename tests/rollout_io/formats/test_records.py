"""Records that are runs: copies, rows of tables, elements of lists."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.formats import agent_lightning, chats, swe_agent, trainers
from rollout_io.formats.engines.files import Start
from tests.helpers.adapter_helpers import read_all

ASK, ANSWER = {"role": "user", "content": "1 + 5?"}, {"role": "assistant", "content": "6"}


def save_rows(path, **columns):
    table = {"step": [7, 7], "prompt": [[ASK]] * 2, "completion": [[ANSWER]] * 2, **columns}
    pq.write_table(pa.table(table), path)
    return path


def test_a_row_with_an_infinite_number_is_refused_by_its_column(tmp_path):
    path = save_rows(tmp_path / "c.parquet", correct=[math.inf, 1.0])
    runs, ((_, error, _),) = read_all(trainers.TRL, path)
    assert [trajectory.reward for _, trajectory in runs] == [1.0]
    assert (error.rule, error.where) == ("record_type", f"{path}, row 0, correct")


def test_each_element_of_a_list_of_chats_is_read_at_its_own_bytes(tmp_path):
    records = [{"messages": [ASK, ANSWER | {"content": str(i)}], "id": f"i{i}"} for i in range(3)]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    content = path.read_bytes()
    runs, _ = read_all(chats.ADAPTER, path)
    places = [run.places[0] for run, _ in runs]
    assert [place.where for place in places] == [f"{path}[{i}]" for i in range(3)]
    parts = [content[place.offset : place.offset + place.num_bytes] for place in places]
    assert [json.loads(part) for part in parts] == records
    assert [read.steps[0].messages[-1]["content"] for _, read in runs] == ["0", "1", "2"]


def test_a_document_of_a_hundred_megabytes_is_recognized(tmp_path):
    history = [ASK | {"agent": "main"}, ANSWER | {"agent": "main", "thought": "LONG"}]
    content = json.dumps({"trajectory": [], "history": history}).encode()
    path = tmp_path / "big.traj"
    path.write_bytes(content.replace(b"LONG", b"x" * 100_000_000))
    assert swe_agent.ADAPTER.recognizes(Start(path))


def test_an_empty_list_in_a_line_is_a_record_that_is_refused(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("{}\n[]\n", encoding="utf-8")
    _, rejected = read_all(agent_lightning.ADAPTER, path)
    assert [(each.place.where, each.error.rule) for each in rejected] == [
        (f"{path}:{number}", "record_type") for number in (1, 2)
    ]


def test_text_in_a_column_of_the_user_is_named_as_not_read(tmp_path):
    path = save_rows(tmp_path / "c.parquet", correct=[1.0, 0.0], note=["a hint", None])
    (first, second) = (trajectory for _, trajectory in read_all(trainers.TRL, path)[0])
    assert (first.unread, second.unread) == ({"note": 1}, {})
