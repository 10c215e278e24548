"""An engine whose answers think and call tools, and how many tokens each row of them has."""

import json

from tests.helpers.fake_engine import FakeAnswer, FakeEngine, answer, event, tokens_of


class SpokenAnswer(FakeAnswer):
    """An answer of a chat completion with these parts.

    Args:
        body: The request.
        said: `reasoning`, `content`, `tool_calls` (name and arguments of each), `finish_reason` and
            `stop_reason`.
        name: Of the answer; its calls are named after it.
    """

    def __init__(self, body, said, name="7"):
        prompt = json.dumps(body["messages"])
        super().__init__(body, prompt, "messages" in body, 1)
        self.said, self.id, self.name = said, f"chatcmpl-{name}", name
        self.finish = said.get("finish_reason", "tool_calls" if said.get("tool_calls") else "stop")
        self.texts = ["".join(text for _, text in self.pieces())]

    def pieces(self):
        """(delta, text) of each piece, in the order in which they were sampled."""
        for name in ("reasoning", "content"):
            for word in _halves(self.said.get(name) or ""):
                yield {name: word}, word
        for index, (name, arguments) in enumerate(self.said.get("tool_calls", ())):
            call = {"index": index, "id": f"call_{self.name}_{index}", "type": "function"}
            yield {"tool_calls": [call | {"function": {"name": name, "arguments": ""}}]}, name
            for half in _halves(arguments):
                yield {"tool_calls": [{"index": index, "function": {"arguments": half}}]}, half

    def whole(self):
        message = {
            "role": "assistant",
            "content": self.said.get("content"),
            "reasoning": self.said.get("reasoning"),
            "tool_calls": [
                {
                    "id": f"call_{self.name}_{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for i, (name, arguments) in enumerate(self.said.get("tool_calls", ()))
            ],
        }
        made = super().whole()
        made["choices"][0] |= {"message": message} | self.end()
        return made

    def end(self):
        return {"finish_reason": self.finish, "stop_reason": self.said.get("stop_reason")}

    def chunks(self):
        kind = "chat.completion.chunk"
        choice = {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": None}
        first = choice | {"delta": {"role": "assistant", "content": ""}}
        prompt = {"prompt_token_ids": self.prompt if self.ids else None}
        yield self.head(kind) | {"choices": [first]} | prompt
        for delta, text in self.pieces():
            sampled = {"token_ids": self.tokens(text), "logprobs": self.logprobs_of(text)}
            yield self.head(kind) | {"choices": [choice | {"delta": delta} | sampled]}
        yield self.head(kind) | {"choices": [choice | {"delta": {}} | self.end()]}
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield self.head(kind) | {"choices": [], "usage": self.usage()}


def _halves(text):
    return [half for half in (text[: len(text) // 2], text[len(text) // 2 :]) if half]


class SpokenEngine(FakeEngine):
    """An engine that says what it is told to.

    Attributes:
        said: Parts of its next answers (`SpokenAnswer`).
        counts: False for an engine that has no `/tokenize`.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.said, self.counts = {"content": "Hello."}, True

    def answer_to(self, body, path):
        if "chat" not in path:
            return super().answer_to(body, path)
        return SpokenAnswer(body, self.said)

    def _events(self, made):
        return [event(chunk) for chunk in made.chunks()]

    async def other(self, body, path, send):
        if path != "/tokenize":
            return False
        if self.counts:
            text = json.dumps(body["messages"]) + json.dumps(body.get("tools", []))
            await answer(send, {"count": len(tokens_of(text)), "max_model_len": 4096})
        else:
            await answer(send, {"detail": "Not Found"}, 404)
        return True


ANSWERS = {
    "text": {"content": "It is sunny."},
    "thinking": {"reasoning": "Warm? Yes.", "content": "It is sunny."},
    "one call": {"content": "Let me look.", "tool_calls": [("ls", '{"path": "/tmp", "n": 2}')]},
    "calls": {
        "reasoning": "Two places.",
        "tool_calls": [("ls", '{"path":"/a"}'), ("ls", '{"path":"/b"}'), ("pwd", "{}")],
    },
    "nothing": {},
    "too long": {"content": "It is", "finish_reason": "length"},
    "stop string": {"content": "It is", "stop_reason": "STOP"},
    "a call cut short": {"tool_calls": [("ls", '{"path": "/a')], "finish_reason": "length"},
}
"""Answers of the engine, by what they show."""


def sampled_text(said):
    """The text of all tokens of an answer."""
    calls = "".join(name + arguments for name, arguments in said.get("tool_calls", ()))
    return (said.get("reasoning") or "") + (said.get("content") or "") + calls


def check_rows(engine, found, answers):
    """Each call is a row whose ids, log-probabilities and text are those of the engine's answer."""
    assert len(found) == len(answers)
    for row, said, request in zip(found, answers, engine.requests, strict=True):
        text = sampled_text(said)
        assert row["response_ids"] == tokens_of(text)
        assert row["prompt_token_ids"] == tokens_of(json.dumps(request["messages"]))
        expected = [-0.25 - ord(c) / 1000 for c in text]
        assert all(
            abs(a - b) < 1e-6 for a, b in zip(row["rollout_logprobs"], expected, strict=True)
        )
        assert row["token_source"] == "engine"
        assert row["stop_reason"] == SpokenAnswer(request, said).finish
        assert (said.get("content") or "") in (row["response_text"] or "")


COLUMNS = ("prompt_token_ids", "response_ids", "rollout_logprobs", "token_source", "stop_reason")
COLUMNS += ("response_text", "messages", "trajectory_id", "temperature", "top_k")
