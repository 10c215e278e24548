"""Episodes of verifiers 0.4.0 (v1): `python make.py http://127.0.0.1:8000/v1`.

Run it in a directory that has the model's tokenizer as `./smollm2`, against a vLLM started with
`--served-model-name smollm2 --enable-scale-out --return-tokens-as-token-ids`. vLLM 0.32 names the
sampled tokens `token_id:N`, as renderers 0.1.12 wants them, in the text mode alone: it is asked for.
"""

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.clients import base
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.episode import GroupInfo, PolicySpan, TrainRunInfo, TrainWorkInfo
from verifiers.v1.trace import WireTrace
from verifiers.v1.utils.trace_store import read_episodes

HERE = Path(__file__).parent
AGENT = {"harness": {"id": "sums"}, "runtime": {"type": "subprocess"}}
ENVS = {
    "eval": {"taskset": {"id": "sums"}, "agent": AGENT},
    "user_sim": {
        "id": "user-sim",
        "taskset": {"id": "sums"},
        "assistant": AGENT,
        "user": {**AGENT, "max_turns": 2},
        "persona": "You are a user. Ask for this: {scenario}",
    },
}


class TextMode(AsyncOpenAI):
    async def post(self, path, *, body=None, **fields):
        mode = {"output_mode": "text"} if path.endswith("/generate") else {}
        return await super().post(path, body={**body, **mode}, **fields)


def config(name, base_url, directory, **fields):
    client = {"type": "train", "base_url": base_url, "api_key_var": "UNUSED"}
    sampling = {"temperature": 1.0, "max_tokens": 24}
    run = {"run": {"name": name, "dir": name}, "output_dir": directory}
    fixed = {"model": "smollm2", "rich": None, "push": False, "max_concurrent": 4}
    fixed |= {"client": client, "sampling": sampling, "env": ENVS[name]}
    return EvalConfig(**fixed, **run, **fields)


def branches(directory):
    """What verifiers makes of each leaf of each trace: the training samples of prime-rl."""
    for episode in read_episodes(directory, WireTrace):
        for trace in episode.traces:
            head = {"episode": episode.id, "trace": trace.id, "reward": trace.reward}
            head |= {"agent": trace.agent.name, "agent_trainable": trace.agent.trainable}
            for branch in trace.branches:
                fields = {"branch": branch.index, "trainable": branch.trainable}
                tokens = {"token_ids": branch.token_ids, "logprobs": branch.logprobs}
                yield {**head, **fields, **tokens, "sampled_mask": branch.sampled_mask}


def stamped(episodes):
    """The episodes as a trainer records them: its group, step and policy versions put on."""
    for episode in episodes:
        work = TrainWorkInfo(step=3, policy=PolicySpan(start=2, end=3))
        episode.record_run(TrainRunInfo(id="run-1", work=work))
        episode.group = GroupInfo(id=f"group-{episode.task.data.idx}")
        yield episode.to_record(float_decimals=None)


def save(path, records):
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def main(base_url):
    base.AsyncOpenAI = TextMode
    directory = Path("vf_out")
    runs = {"eval": {"num_rollouts": 2}, "user_sim": {"num_rollouts": 1, "select": {"limit": 1}}}
    episodes = {}
    for name, fields in runs.items():
        run = run_eval(config(name, base_url, directory, **fields))
        episodes[name] = asyncio.run(run)
        saved = (directory / name / "traces.jsonl").read_text()
        traces = HERE / name / "traces.jsonl"
        traces.parent.mkdir(exist_ok=True)
        traces.write_text(saved.replace(sys.prefix, "/venv").replace(str(HERE), "/plugin"))
        expected = json.dumps(list(branches(traces.parent)), separators=(",", ":"))
        (HERE / name / "expected.json").write_text(expected)
    done = [episode for episode in episodes["eval"] if episode.ok][:2]
    save(HERE / "train" / "traces.jsonl", stamped(done))


if __name__ == "__main__":
    main(sys.argv[1])
