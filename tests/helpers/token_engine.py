"""An engine that renders, samples a script and parses it, with a real tokenizer: as vLLM does it."""

import json
import re

from rollout_io.retokenize.chat_template import normalize
from tests.helpers.fake_engine import FakeEngine, answer, event

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
DERENDER = "/v1/chat/completions/derender"


def parsed(text):
    """The message that a text is: reasoning, content and calls."""
    thought, _, rest = text.rpartition("</think>")
    calls = [json.loads(found) for found in CALL.findall(rest)]
    made = {"role": "assistant", "content": CALL.sub("", rest) or None}
    made["reasoning"] = thought.removeprefix("<think>") or None
    made["tool_calls"] = [
        {
            "id": f"call_{abs(hash((text, i)))}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for i, call in enumerate(calls)
    ]
    return made


class TokenEngine(FakeEngine):
    """The engine.

    Args:
        tokenizer: Its tokenizer and template.
        script: Texts of its answers, in order.
        parses: False for an engine that has no parser of ids.
    """

    def __init__(self, tokenizer, script, *, parses=True):
        super().__init__()
        self.tokenizer, self.script, self.parses = tokenizer, list(script), parses
        self.paths = []

    async def other(self, body, path, send):
        self.paths.append(path)
        if path == DERENDER:
            await self._derender(body, send)
            return True
        self.requests.append(body)
        is_chat = "messages" in body
        prompt = self._rendered(body["messages"]) if is_chat else body["prompt"]
        text = self.script.pop(0)
        ids = [*self.tokenizer.encode([text], ["answer"])[0], self.tokenizer.eos_token_id]
        made = self._made_of(is_chat, body, prompt, text, ids)
        if body.get("stream"):
            await self._chunks(made, send)
        else:
            await answer(send, made)
        return True

    def _rendered(self, messages):
        plain = [normalize(message, "message") for message in messages]
        text = self.tokenizer.render(plain, generation_prompt=True)
        return self.tokenizer.encode([text], ["prompt"])[0]

    def _made_of(self, is_chat, body, prompt, text, ids):
        logprobs = [-0.5 for _ in ids]
        tokens = [self.tokenizer.backend.decode([each]) for each in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "stop_reason": None}
        top = {"id": f"cmpl-{len(self.requests)}", "created": 1, "model": body["model"]}
        top["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        if not is_chat:
            choice |= {"text": text, "prompt_token_ids": prompt}
            choice["logprobs"] = {"token_logprobs": logprobs, "tokens": tokens}
            return top | {"object": "text_completion", "choices": [choice]}
        choice["message"] = parsed(text)
        if choice["message"]["tool_calls"]:
            choice["finish_reason"] = "tool_calls"
        choice["logprobs"] = {"content": [{"token": t, "logprob": -0.5} for t in tokens]}
        top["id"] = f"chat{top['id']}"
        top["prompt_token_ids"] = prompt
        return top | {"object": "chat.completion", "choices": [choice]}

    async def _chunks(self, made, send):
        (choice,) = made["choices"]
        delta = choice.pop("message", None)
        if delta is not None:
            delta["tool_calls"] = [
                call | {"index": i} for i, call in enumerate(delta["tool_calls"])
            ]
            choice["delta"] = delta
        usage = made.pop("usage")
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        content = event(made) + event(made | {"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": content})

    async def _derender(self, body, send):
        if not self.parses:
            await answer(send, {"error": {"message": "disabled"}}, 403)
            return
        (choice,) = body["generate_response"]["choices"]
        text = self.tokenizer.decode(choice["token_ids"])
        made = {"index": 0, "message": parsed(text), "finish_reason": choice["finish_reason"]}
        await answer(send, {"id": "x", "object": "chat.completion", "choices": [made]})
