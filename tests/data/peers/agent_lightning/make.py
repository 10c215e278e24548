"""Events of Agent Lightning 1.0.2: `python make.py http://127.0.0.1:8000/v1`.

Its own server runs in this process; agents call the model through its proxy, against a vLLM started
with `--served-model-name smollm2`. It keeps events in memory, so what its API gives is saved.
"""

import json
import sys
from pathlib import Path

from agentlightning.server.app import create_app
from fastapi.testclient import TestClient

HERE = Path(__file__).parent
SUMS = [(2, 3), (4, 1)]
CONFIG = {
    "key": "",
    "default_proxy": {
        "model_name": "smollm2",
        "train": {"temperature": 1.0},
        "val": {"temperature": 0.0},
    },
}


def ask(server, rollout, attempt, path, body):
    mode = "train" if rollout["is_train"] else "val"
    base = f"/proxy/rollout/{rollout['rollout_id']}/attempt/{attempt}/mode/{mode}/openai/v1"
    return server.post(f"{base}/{path}", json={"model": "any", "max_tokens": 12, **body}).json()


def chat(server, rollout, attempt, questions, **fields):
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, **fields}
        reply = ask(server, rollout, attempt, "chat/completions", body)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return " ".join(message["content"] for message in messages[1::2])


def post(server, rollout, attempt, event_type, **data):
    url = f"/api/rollouts/{rollout['rollout_id']}/attempt/{attempt}/events"
    server.post(url, json={"event_type": event_type, "data": data})


def finish(server, rollout, state, attempt):
    for step in ("running", state):
        status = {"state": step, "last_attempt_id": attempt}
        server.patch(f"/api/rollouts/{rollout['rollout_id']}", json={"status": status})


def play(server, rollout):
    """Two turns, a reward; repetition 1 of the first sum only after a first attempt was lost."""
    question, metadata = rollout["input"]["question"], rollout["metadata"]
    attempt = "0"
    if metadata["sample_idx_in_batch"] == 1:
        chat(server, rollout, attempt, [question])
        attempt = "1"
    reply = chat(server, rollout, attempt, [question, "Are you sure? One number."])
    value = float(rollout["input"]["answer"] in reply)
    post(server, rollout, attempt, "reward", value=value, source="agent", reason="number said")
    finish(server, rollout, "succeeded", attempt)


def odd(server, rollout):
    """Two samples of one prompt, a text completion, a refused request, an event of its own."""
    chat(server, rollout, "0", [rollout["input"]["question"]], n=2)
    ask(server, rollout, "0", "completions", {"prompt": "2 + 3 =", "max_tokens": 4})
    ask(server, rollout, "0", "chat/completions", {"messages": "none"})
    post(server, rollout, "0", "note", text="gave up")
    finish(server, rollout, "failed", "0")


def inputs():
    for index, (a, b) in enumerate(SUMS):
        question = {"data_id": f"sum-{index}", "question": f"What is {a} + {b}?"}
        for sample in range(2):
            metadata = {"batch_idx": 0, "sample_idx_in_batch": 2 * index + sample}
            rollout_id = f"sum-{index}-{sample}"
            entry = {"input": {**question, "answer": str(a + b)}, "metadata": metadata}
            yield {**entry, "rollout_id": rollout_id}


def save(name, records):
    with (HERE / name).open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def main(base_url):
    with TestClient(create_app(CONFIG)) as server:
        server.post("/api/models", json=[{"model": "smollm2", "endpoint": base_url, "version": 3}])
        rollouts = server.post("/api/rollouts", json=list(inputs())).json()
        for rollout in rollouts[:3]:
            play(server, rollout)
        odd(server, rollouts[3])
        states = {"state_in": ["succeeded", "failed"]}
        save("rollouts.jsonl", server.get("/api/rollouts", params=states).json())
        urls = [f"/api/rollouts/{rollout['rollout_id']}/events" for rollout in rollouts]
        save("events.jsonl", [event for url in urls for event in server.get(url).json()])
        triplets = [server.get(url, params={"format": "triplet"}).json() for url in urls]
        (HERE / "expected.json").write_text(json.dumps(triplets))


if __name__ == "__main__":
    main(sys.argv[1])
