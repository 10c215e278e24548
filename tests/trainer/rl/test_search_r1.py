"""The Search-R1 example: its retriever, the environment of skyrl-gym on it, and all of its stages."""

import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib

import httpx2
import polars as pl
import pytest
from skyrl_gym.tools.search import call_search_api

import pipelines
import rollout_io
from examples import search_r1
from examples.retriever import BM25, read_corpus, serving
from pipelines.generation.config import GenerateConfig
from pipelines.generation.tasks import read_tasks
from rollout_io.cli.main import run
from tests.conftest import ROOT
from tests.helpers.configs import SECTIONS
from tests.helpers.generation_helpers import trajectories
from tests.helpers.rl_helpers import save_model
from trainer.engine.embedded import TransformersEngine
from trainer.reports.run_plot import read_metrics
from trainer.rl.config import EvaluateConfig

DOCUMENTS = [
    "the red fox",
    "a fox, a fox and a hare",
    "the blue whale",
    "one hare in the long grass",
]
IS_OPEN = "<information>"
PAGE = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def served():
    with serving(DOCUMENTS, 0) as url:
        yield url


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    search_r1.write_data(folder)
    return folder


class Scripted(TransformersEngine):
    """Searches for the last name of the prompt; every other answer is right."""

    num_answers = 0

    async def sample(self, prompt_token_ids, sampling, *, session=None):
        sampled = await super().sample(prompt_token_ids, sampling, session=session)
        prompt = self.tokenizer.backend.decode(prompt_token_ids)
        name = re.findall(r"Where does (\w+) live", prompt)[-1]
        text = f"<search>{name}</search>"
        if prompt.rpartition("Question:")[2].count(IS_OPEN):
            Scripted.num_answers += 1
            home = re.findall(r"lives in (\w+)", prompt)[-1]
            text = f"<answer>{home if Scripted.num_answers % 2 else 'Atlantis'}</answer>"
        (ids,) = self.tokenizer.encode([text], ["text"])
        logprobs = [-10.8] * len(ids)
        return dataclasses.replace(
            sampled, response_ids=ids, rollout_logprobs=logprobs, text=text, stop_reason="stop"
        )


def test_documents_are_ranked_by_how_often_they_have_how_rare_words():
    index = BM25(DOCUMENTS)
    assert [text for text, _ in index.search("Fox hare", 9)] == [
        "a fox, a fox and a hare",
        "the red fox",
        "one hare in the long grass",
    ]
    assert [text for text, _ in index.search("the whale", 1)] == ["the blue whale"]
    assert index.search("nothing of this", 3) == [] == index.search("", 3)
    (_, score), *_ = index.search("whale", 3)
    # idf ln(1 + 3.5 / 1.5), one occurrence in 3 of on average 4.75 words
    assert score == pytest.approx(1.2040 * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 3 / 4.75)), rel=1e-4)


def test_the_retriever_answers_what_skyrl_gyms_tool_asks(served):
    found, error = call_search_api(served, "fox", topk=1)
    assert error is None
    ((hit,),) = found["result"]
    assert hit["document"] == {"contents": "a fox, a fox and a hare"}
    assert hit["score"] > 0
    assert call_search_api(served, "zebra") == ({"result": []}, None)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", b'{"query": 1, "topk": 1}', b'{"query": "a"}']
    + [b'{"query": "a", "topk": %s}' % topk for topk in (b"0", b"true", b"1.5", b'"3"')],
)
def test_a_request_that_is_none_is_refused_with_what_was_expected(served, content):
    answer = httpx2.post(served, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith('Expected {"query": text, "topk": number >= 1}: ')
    assert httpx2.post(f"{served}s", content=content).status_code == 404


def test_the_retriever_leaves_no_thread_and_no_socket():
    before = set(threading.enumerate())
    with serving(DOCUMENTS, 0) as url:
        port = int(re.findall(r":(\d+)/", url)[0])
        assert call_search_api(url, "fox")[1] is None
        with pytest.raises(SystemExit, match=f"port {port}: Address already in use"):
            serving(DOCUMENTS, port).__enter__()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_the_retrievers_own_command_serves_a_corpus_until_it_is_interrupted(data):
    command = [sys.executable, search_r1.CONFIG.with_name("retriever.py"), data / "corpus.jsonl"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        found, _ = call_search_api(re.findall(r"http\S+retrieve", said)[0], "Alice", topk=5)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert said.startswith(f"{2 * len(search_r1.NAMES)} documents at")
    assert [hit["document"]["contents"].split()[0] for hit in found["result"][0]] == ['"Alice"'] * 2


@pytest.mark.slow
def test_a_stage_is_a_command_whose_exit_code_counts(capfd):
    assert search_r1.stage("validate", "/no such dataset") == 1
    said = capfd.readouterr()
    assert said.out == "\n$ rollouts validate '/no such dataset'\n"
    assert said.err.startswith("Error: ")


@pytest.mark.parametrize("history", ["step_wise", "append", "one_message"])
def test_what_was_searched_is_masked_and_the_answer_is_rewarded(model, tokenizer, data, history):
    tasks = read_tasks(str(data / "train.parquet"), 2)[:4]
    config = tomllib.loads(search_r1.CONFIG.read_text())["generate"]
    with serving(read_corpus(data / "corpus.jsonl"), 0) as url:
        settings = config | {"env_config": {"search_url": url, "topk": 2}, "history": history}
        del settings["group_size"]
        _, table = trajectories(Scripted(model, tokenizer), tokenizer, tasks, **settings)
    rows, decode = pl.from_arrow(table), tokenizer.backend.decode
    assert rows["step_index"].to_list() == [0, 1] * 4
    assert sorted(rows.filter("is_last_step")["reward"]) == [0, 0, 1, 1]
    assert rows.filter(~pl.col("is_last_step"))["reward"].to_list() == [0] * 4
    merged = pipelines.merge(rows.lazy()).collect()
    for task, row in zip(tasks, merged.iter_rows(named=True), strict=True):
        pairs = list(zip(row["response_ids"], row["loss_mask"], strict=True))
        trained, masked = (decode([i for i, m in pairs if m is wanted]) for wanted in (True, False))
        (home,) = task.extras["reward_spec"]["ground_truth"]["target"]
        name = task.prompt[-1]["content"].split()[3]
        answer = home if row["reward"] else "Atlantis"
        assert trained == f"<search>{name}</search><answer>{answer}</answer>"
        assert re.search(f"<information>.*{name} lives in {home}.*</information>", masked, re.S)


@pytest.mark.slow
def test_the_whole_example_runs_and_both_layouts_make_the_same_updates(
    tmp_path, tokenizer, monkeypatch, capsys
):
    settings = ["loop.num_iterations=1", "generate.group_size=4", "evaluate.every_iterations=9"]
    settings += ["batch.groups_per_batch=2", "batch.groups_per_mini_batch=1"]
    model = save_model(tmp_path / "model", tokenizer, max_position_embeddings=2048)
    monkeypatch.setattr("trainer.engine.embedded.TransformersEngine", Scripted)
    monkeypatch.setattr(search_r1, "stage", lambda *arguments: run(arguments))
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)
    assert search_r1.search_r1(tmp_path / "out", 0, [*settings, f"model.path={model}"]) == 0
    text = capsys.readouterr().out
    assert "largest difference between weights" in text
    step, merge = (read_metrics(tmp_path / "out" / name) for name in ("step", "merge"))
    assert all(line["grad_norm"] > 1e-3 for line in step)
    assert sum(a["num_forwarded_tokens"] for a in step) > 1.5 * sum(
        b["num_forwarded_tokens"] for b in merge
    )
    lines = tmp_path / "out/step/metrics.jsonl"
    lines.write_text(
        "".join(json.dumps(x | {"grad_norm": 1.01 * x["grad_norm"]}) + "\n" for x in step)
    )
    assert search_r1.compare(tmp_path / "out") == 1


def test_the_page_names_the_settings_that_the_example_has():
    given = tomllib.loads(search_r1.CONFIG.read_text())
    kinds = SECTIONS | {"generate": GenerateConfig, "evaluate": EvaluateConfig}
    usual = {
        name: {f.name: f.default for f in dataclasses.fields(kind)} for name, kind in kinds.items()
    }
    usual["evaluate"]["temperature"] = 0.0
    rows = re.findall(
        r"^\| .+ \| .+ \| (?:`\[(\w+)\] (\w+)`).* \| \(?`(.+)`\)? \|$", PAGE, re.MULTILINE
    )
    assert len(rows) > 25
    for table, key, value in rows:
        found = (usual[table] | given.get(table, {}))[key]
        found = list(found) if found == () else found
        assert tomllib.loads(f"value = {value}")["value"] == found, key
    named = {(table, key) for table, key, _ in rows}
    for table in given.keys() - {"model", "loop", "evaluate"}:
        assert {(table, key) for key in given[table]} <= named


SMALL = ["loop.num_iterations=1", "batch.groups_per_batch=2", "batch.groups_per_mini_batch=1"]


@pytest.mark.nightly  # four minutes of an otherwise idle machine
@pytest.mark.vllm
def test_the_example_samples_from_a_real_vllm(tmp_path, start_vllm):
    with start_vllm("--logprobs-mode", "processed_logprobs") as server:
        engine = ["generate.engine=vllm", f'generate.urls=["{server.url}"]']
        assert search_r1.search_r1(tmp_path / "out", 0, [*SMALL, *engine]) == 0


@pytest.mark.nightly
@pytest.mark.model
def test_the_pages_command_runs_with_the_real_model(tmp_path, smollm2_dir):
    del smollm2_dir
    (line,) = re.findall(r"^    (PYTHONPATH=. python .*) runs/search_r1$", PAGE, re.MULTILINE)
    command = f"{line} {tmp_path}/out --port 0 {' '.join(f'--set {each}' for each in SMALL)}"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        "<information>" in rollout_io.scan(f"{tmp_path}/out/rl/rollouts/*").collect()["messages"][1]
    )
