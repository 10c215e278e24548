"""Debug rollout data of slime: `python make.py http://127.0.0.1:8000`.

Needs torch, httpx, slime's `slime` on the path (utils.types, observability.rollout_data_utils), and
a vLLM in SGLang's place, started with `--served-model-name smollm2`.
"""

import json
import sys
from pathlib import Path

import httpx
import torch
from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.utils.types import Sample

HERE = Path(__file__).parent
EXACT = {"model": "smollm2", "logprobs": 0, "return_token_ids": True, "temperature": 1.0}
TURN = "<|im_end|>\n<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"


def tokenize(url, **fields):
    return httpx.post(f"{url}/tokenize", json={"model": "smollm2", **fields}).json()["tokens"]


def generate(url, ids, max_tokens, cut=None):
    """Token ids, log-probabilities, text and why it ended; `cut` hangs up after that many tokens."""
    request = {**EXACT, "prompt": ids, "max_tokens": max_tokens, "stream": True}
    choices = []
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices.append(json.loads(line[6:])["choices"][0])
            if len(choices) == cut:
                break
    tokens = [token for choice in choices for token in choice["token_ids"]]
    logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    reason = "abort" if cut else choices[-1]["finish_reason"]
    return tokens, logprobs, "".join(choice["text"] for choice in choices), reason


def extend(url, sample, max_tokens, cut=None):
    num_prompt_tokens = len(sample.tokens)
    tokens, logprobs, text, reason = generate(url, sample.tokens, max_tokens, cut)
    meta = {"finish_reason": {"type": reason}, "weight_version": "3", "cached_tokens": 0}
    meta["prompt_tokens"] = num_prompt_tokens
    sample.append_response_tokens(tokens=tokens, log_probs=logprobs, text=text, meta_info=meta)


def begin(url, group, index, question, label):
    prompt = [{"role": "user", "content": question}]
    tokens = tokenize(url, messages=prompt)
    fields = {"group_index": group, "index": index, "label": label}
    return Sample(prompt=prompt, tokens=tokens, session_id=f"session-{index}", **fields)


def answer(url, group, index):
    sample = begin(url, group, index, "What is 2 + 3?", "5")
    extend(url, sample, max_tokens=16)
    sample.reward = float(sample.label in sample.response)
    return sample


def use_tool(url, group, index):
    """Two answers with a user's turn between them, under loss mask 0."""
    sample = begin(url, group, index, "What is 4 + 1?", "5")
    extend(url, sample, max_tokens=12)
    text = TURN.format(role="user", text="Are you sure?")
    ids = tokenize(url, prompt=text, add_special_tokens=False)
    sample.append_response_tokens(tokens=ids, trainable=False, text=text)
    extend(url, sample, max_tokens=12)
    sample.reward = float(sample.label in sample.response)
    sample.metadata = {"num_turns": 2}
    return sample


def abort(url, group, index):
    sample = begin(url, group, index, "What is 4 + 1?", "5")
    extend(url, sample, max_tokens=40, cut=5)
    return sample


def evaluate(url, index):
    sample = answer(url, None, index)
    sample.reward = {"score": sample.reward, "format": 0.5}
    return sample


def main(url):
    samples = [answer(url, 0, 0), answer(url, 0, 1), use_tool(url, 1, 2), abort(url, 1, 3)]
    template = str(HERE / "rollout_{rollout_id}.pt")
    save_debug_rollout_data(template, samples, rollout_id=7, evaluation=False)
    scored = {"sums": {"samples": [evaluate(url, 0)]}}
    save_debug_rollout_data(template, scored, rollout_id=7, evaluation=True)
    for name in ("rollout_7", "rollout_eval_7"):
        saved = torch.load(HERE / f"{name}.pt", weights_only=True)
        (HERE / f"{name}.json").write_text(json.dumps(saved))


if __name__ == "__main__":
    main(sys.argv[1])
