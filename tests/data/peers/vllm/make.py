"""Wire logs of a vLLM server in the `calls` shape: `python make.py http://127.0.0.1:8000/v1`.

Needs litellm (1.109.1 was used) and a vLLM started with
`--served-model-name smollm2 --enable-auto-tool-choice --tool-call-parser hermes`.
Repetition 0 of an instance is asked for whole, repetition 1 asks the same again as a stream; a
streamed response is the list of the chunks in the order received, without `[DONE]`.
"""

import json
import sys
import time
from pathlib import Path

import httpx
import litellm

HERE = Path(__file__).parent
MODEL = "smollm2"
EXACT = {"logprobs": True, "return_token_ids": True, "seed": 7}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
USE_TOOLS = (
    'You call get_weather by answering <tool_call>{"name": "get_weather", '
    '"arguments": {"city": "NAME"}}</tool_call> and nothing else.'
)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def post(base_url, path, request):
    reply = httpx.post(f"{base_url}/{path}", json=request, timeout=120)
    reply.raise_for_status()
    return reply.json()


def stream(base_url, path, request):
    with httpx.stream("POST", f"{base_url}/{path}", json=request, timeout=120) as reply:
        reply.raise_for_status()
        data = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(chunk) for chunk in data if chunk != "[DONE]"]


def text_of(response):
    if isinstance(response, dict):
        return response["choices"][0]["message"]["content"]
    parts = [c["choices"][0]["delta"].get("content") for c in response if c["choices"]]
    return "".join(part or "" for part in parts)


def exchange(base_url, session, path, request, streamed):
    if streamed:
        request = {**request, "stream": True, "stream_options": {"include_usage": True}}
    began = time.time()
    response = (stream if streamed else post)(base_url, path, request)
    return call_line(f"{session}/{int(streamed)}", began, request, response)


def call_line(session, began, request, response):
    fields = {"session": session, "agent": "main", "time": began}
    return {**fields, "request": request, "response": response}


def converse(base_url, session, request, turns, streamed):
    """One call per turn, each on the conversation so far."""
    messages = [system("You answer in one short sentence.")]
    for turn in turns:
        messages.append(user(turn))
        call = {**request, "messages": list(messages)}
        line = exchange(base_url, session, "chat/completions", call, streamed)
        messages.append({"role": "assistant", "content": text_of(line["response"])})
        yield line


def chat(base_url, streamed):
    greedy = {"model": MODEL, "max_tokens": 20, "temperature": 0.0, **EXACT}
    yield from converse(base_url, "chat", greedy, ["What is 2 + 3?", "And plus 4?"], streamed)
    several = {**greedy, "max_tokens": 10, "temperature": 1.0, "n": 2}
    several["messages"] = [user("Name a colour.")]
    yield exchange(base_url, "chat_n2", "chat/completions", several, streamed)


def completions(base_url, streamed):
    ask = {"model": MODEL, "max_tokens": 12, "temperature": 0.0, "seed": 7}
    ask |= {"logprobs": 0, "return_token_ids": True}
    one = {**ask, "prompt": "The capital of France is"}
    two = {**ask, "prompt": "My favourite animal is", "n": 2, "temperature": 1.0}
    batch = {**ask, "prompt": ["One two three", "Red green"], "max_tokens": 6, "logprobs": 1}
    asked = {"text": one, "text_n2": two, "text_batch": batch}
    for session, request in asked.items():
        yield exchange(base_url, session, "completions", request, streamed)


def tools(base_url, streamed):
    """The model's own call in Hermes style, the same cut short, and a call the server forces."""
    ask = {"model": MODEL, "max_tokens": 40, "temperature": 0.0, **EXACT, "tools": [TOOL]}
    example = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    shown = [user("Weather in Rome?"), {"role": "assistant", "content": example}]
    free = {**ask, "messages": [system(USE_TOOLS), *shown, user("Weather in Oslo?")]}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    forced = {
        **ask,
        "max_tokens": 16,
        "messages": [user("Weather in Oslo?")],
        "tool_choice": choice,
    }
    asked = {"tool_free": free, "tool_cut": {**free, "max_tokens": 24}, "tool_forced": forced}
    for session, request in asked.items():
        yield exchange(base_url, session, "chat/completions", request, streamed)


def through_litellm(base_url, streamed):
    """LiteLLM's own response objects, dumped."""
    request = {"model": f"hosted_vllm/{MODEL}", "max_tokens": 16, "temperature": 0.0}
    request |= {"messages": [user("What is 2 + 3?")], "logprobs": True, "seed": 7}
    request |= {"extra_body": {"return_token_ids": True}, "stream": streamed}
    began = time.time()
    response = litellm.completion(**request, api_base=base_url)
    dumped = [c.model_dump() for c in response] if streamed else response.model_dump()
    yield call_line(f"litellm/{int(streamed)}", began, request, dumped)


def save(name, make, base_url):
    lines = [line for streamed in (False, True) for line in make(base_url, streamed)]
    with (HERE / f"{name}.calls.jsonl").open("w") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def main(base_url):
    makers = {"chat": chat, "completions": completions, "tools": tools}
    for name, make in {**makers, "litellm": through_litellm}.items():
        save(name, make, base_url)


if __name__ == "__main__":
    main(sys.argv[1])
