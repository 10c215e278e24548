"""Episodes of rLLM: `python make.py http://127.0.0.1:8000/v1`.

Needs rLLM's `rllm` on the path (types, eval.episode_store, engine.rollout, workflows.workflow), and
a vLLM started with `--served-model-name smollm2`.
"""

import shutil
import sys
from pathlib import Path

import httpx
from rllm.engine.rollout import ModelOutput
from rllm.eval.episode_store import EvalEpisodeStore
from rllm.types import Episode, Step, Task, Trajectory
from rllm.workflows.workflow import TerminationReason

HERE = Path(__file__).parent
TASK = Task(id="sum-2-3", instruction="What is 2 + 3?", metadata={"answer": "5"})
EXACT = {"model": "smollm2", "logprobs": True, "return_token_ids": True, "max_tokens": 10}
SHORTER = 8


def call(base_url, messages):
    """One model call as rLLM's engine hands it on."""
    request = {**EXACT, "messages": messages, "temperature": 1.0}
    reply = httpx.post(f"{base_url}/chat/completions", json=request, timeout=60).json()
    choice = reply["choices"][0]
    ids = {"prompt_ids": reply["prompt_token_ids"], "completion_ids": choice["token_ids"]}
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    lengths = {f"{name.removesuffix('_ids')}_length": len(ids[name]) for name in ids}
    text = choice["message"]["content"]
    ended = {"finish_reason": choice["finish_reason"], "weight_version": 3}
    return ModelOutput(text=text, content=text, logprobs=logprobs, **ids, **lengths, **ended)


def solve(base_url, shorten):
    """Three steps; `shorten` cuts the earlier answers, so that the prompts do not only grow."""
    messages, steps = [], []
    for question in [TASK.instruction, "Are you sure?", "One number, please."]:
        messages.append({"role": "user", "content": question})
        output = call(base_url, messages)
        step = Step.from_model_output(output, messages, action=output.content)
        step.observation = question
        steps.append(step)
        answer = output.content[:SHORTER] if shorten else output.content
        messages.append({"role": "assistant", "content": answer})
    steps[-1].done = True
    said = [TASK.metadata["answer"] in step.model_response for step in steps]
    steps[-1].reward = float(any(said))
    return Trajectory(name="solver", task=TASK.id, steps=steps, reward=steps[-1].reward)


def check(base_url, answer):
    messages = [{"role": "user", "content": f"Is this right? 2 + 3: {answer}"}]
    step = Step.from_model_output(call(base_url, messages), messages)
    return Trajectory(name="checker", task=TASK.id, steps=[step], reward=0.0)


def play(base_url, attempt):
    solver = solve(base_url, shorten=attempt == 1)
    checker = check(base_url, solver.steps[-1].model_response)
    fields = {"id": f"{TASK.id}:{attempt}", "task": TASK, "trajectories": [solver, checker]}
    ended = {"termination_reason": TerminationReason.ENV_DONE, "is_correct": solver.reward > 0}
    return Episode(**fields, **ended, session_id=f"session-{attempt}", metrics={"num_steps": 4})


def main(base_url):
    shutil.rmtree(HERE / "eval_results", ignore_errors=True)
    store = EvalEpisodeStore(HERE / "eval_results")
    store.write_meta({"benchmark": "sums", "model": "smollm2", "agent": "two", "attempts": 2})
    for attempt in range(2):
        store.write(attempt, play(base_url, attempt))


if __name__ == "__main__":
    main(sys.argv[1])
