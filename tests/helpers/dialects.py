"""Clients of three APIs that translated calls speak, as one."""

import json
from contextlib import asynccontextmanager

import aiohttp
import anthropic
import httpx2
import msgspec
import openai
from google import genai
from google.genai import errors, types

from pipelines.record.dialects.anthropic import MessagesCall
from pipelines.record.dialects.base import Chat
from pipelines.record.dialects.gemini import GeminiCall
from pipelines.record.dialects.responses import ResponsesCall
from tests.helpers.dialect_helpers import SpokenAnswer
from tests.helpers.recorder_helpers import recording

QUESTION = "How is it?"
UNCHECKED = {"api_key": "k", "max_retries": 0}


class Dialect:
    """An API with its own client.

    Attributes:
        path: Of its calls.
        ask: A request, as the client takes it.
        body: The same as JSON.
        key: Header of the API's key.
        broken: Error of the client where a stream breaks off.
    """

    ask: dict
    key = "authorization"

    @property
    def body(self):
        return self.ask

    def call(self, **fields):
        return self.translated(json.dumps(self.body | fields).encode(), self.path, {})

    def direct(self, answer, **fields):
        """What a direct translation of the engine's answer gives."""
        call = self.call(**fields)
        whole = SpokenAnswer(call.chat | {"return_token_ids": True}, answer).whole()
        return call.answer(msgspec.convert(whole, Chat))


class Messages(Dialect):
    path, translated, key = "/v1/messages", MessagesCall, "x-api-key"
    broken, refused = httpx2.HTTPError, anthropic.APIStatusError

    def __init__(self):
        self.tool = {"name": "ls", "description": "List.", "input_schema": {"type": "object"}}
        self.ask = {"model": "fake", "max_tokens": 64, "tools": [self.tool]}
        self.ask["messages"] = [{"role": "user", "content": QUESTION}]

    def client(self, root):
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        return anthropic.AsyncAnthropic(base_url=root, http_client=http, **UNCHECKED)

    async def whole(self, spoken, **fields):
        return self.plain(await spoken.messages.create(**self.ask | fields))

    async def read(self, spoken, saw, **fields):
        """The message of a stream; `saw` gets each piece of its text."""
        async with spoken.messages.stream(**self.ask | fields) as stream:
            async for event in stream:
                if event.type == "text":
                    saw(event.text)
            return self.plain(await stream.get_final_message())

    def plain(self, message):
        fields = json.loads(message.model_dump_json(exclude_unset=True))
        return {name: value for name, value in fields.items() if name != "stop_details"}


class Responses(Dialect):
    path, translated = "/v1/responses", ResponsesCall
    broken, refused = openai.APIConnectionError, openai.APIStatusError

    def __init__(self):
        self.tool = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
        self.ask = {"model": "fake", "instructions": "Be brief.", "tools": [self.tool]}
        content = [{"type": "input_text", "text": QUESTION}]
        self.ask["input"] = [{"role": "user", "content": content}]

    def client(self, root):
        http = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(base_url=f"{root}/v1", http_client=http, **UNCHECKED)

    async def whole(self, spoken, **fields):
        return self.plain(await spoken.responses.create(**self.ask | fields))

    async def read(self, spoken, saw, **fields):
        events = []
        async for event in await spoken.responses.create(**self.ask | fields, stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                saw(event.delta)
        self.events = events
        return self.plain(events[-1].response)

    def plain(self, response):
        return response.model_dump(mode="json", exclude_unset=True)


class Gemini(Dialect):
    path, translated, key = "/v1beta/models/fake:generateContent", GeminiCall, "x-goog-api-key"
    broken, refused = aiohttp.ClientPayloadError, errors.APIError

    def __init__(self):
        path = {"type": "STRING", "nullable": True}
        self.schema = {"type": "OBJECT", "properties": {"path": path}}
        declared = {"name": "ls", "description": "List.", "parameters": self.schema}
        self.tool = {"functionDeclarations": [declared]}
        self.contents = [{"role": "user", "parts": [{"text": QUESTION}]}]
        self.config = {"tools": [self.tool], "thinking_config": {"include_thoughts": True}}
        self.config["automatic_function_calling"] = {"disable": True}
        self.ask = {"model": "fake", "contents": self.contents, "config": self.config}

    @property
    def body(self):
        thinking = {"thinkingConfig": {"includeThoughts": True}}
        return {"contents": self.contents, "tools": [self.tool], "generationConfig": thinking}

    def client(self, root):
        unchecked = {"client_args": {"verify": False}, "async_client_args": {"ssl": False}}
        options = types.HttpOptions(base_url=root, **unchecked)
        return genai.Client(api_key="k", http_options=options).aio

    async def whole(self, spoken, **fields):
        return self.plain(await spoken.models.generate_content(**self.ask | fields))

    async def read(self, spoken, saw, **fields):
        answers = []
        async for answer in await spoken.models.generate_content_stream(**self.ask | fields):
            answers.append(self.plain(answer))
            if answer.text:
                saw(answer.text)
        *pieces, last = answers
        parts = [part for one in pieces for part in one["candidates"][0]["content"]["parts"]]
        assert all("finishReason" not in one["candidates"][0] for one in pieces)
        last["candidates"][0]["content"]["parts"] = joined(parts)
        return last

    def plain(self, answer):
        fields = answer.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {name: value for name, value in fields.items() if name != "sdkHttpResponse"}


def joined(parts):
    """Parts of a stream, with the pieces of each text joined."""
    whole = []
    for part in parts:
        last = whole[-1] if whole else {}
        if last.keys() == part.keys() and "text" in part:
            last["text"] += part["text"]
        elif part != {"text": ""}:
            whole.append(dict(part))
    return whole


@asynccontextmanager
async def speaking(dialect, out, engine, **settings):
    """The API's client in session a/0 of a recorder, which ends with the block, and a plain one."""
    async with recording(out, engine, **settings) as client:
        async with dialect.client(f"{client.root}/s/a/0") as spoken:
            yield spoken, client
        await client.post("/s/a/0/end", json={"reward": 1.0})
