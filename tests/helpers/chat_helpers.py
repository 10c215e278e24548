"""Conversations of every kind, and what a template of ours makes of them."""

from typing import Any

from rollout_io.retokenize.chat_template import normalize

Message = dict[str, Any]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a "city": its sky, in °C.',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def user(content):
    return {"role": "user", "content": content}


def called(arguments, number):
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def tool(content, number):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


SYSTEM = {"role": "system", "content": "You are brief."}
ANSWERED = [
    user("Hi."),
    {"role": "assistant", "content": "\n\nHello.\n"},
    user("And you? \U0001f600"),
]
THOUGHT = [
    user("2+2?"),
    {"role": "assistant", "content": "4", "reasoning": "Two and two.\nFour."},
    user([{"type": "text", "text": "3+3?"}, {"type": "text", "text": "Quickly."}]),
]
CALLED = [
    user("The weather in Oslo and Århus?"),
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I need both.",
        "tool_calls": [called('{"city":"Oslo",  "days": 2}', 0), called('{"city": "Århus"}', 1)],
    },
    tool("Snow.", 0),
    tool([{"type": "text", "text": "Rain."}], 1),
    {"role": "assistant", "content": "Let me see.", "tool_calls": [called("{}", 2)]},
    tool("<b>no city</b>", 2),
]
CONVERSATIONS = {
    "one message": ([user("Hi.")], None),
    "system": ([SYSTEM, user("Hi.")], None),
    "turns": (ANSWERED, None),
    "thinking": (THOUGHT, None),
    "tools": ([user("The weather?")], [WEATHER]),
    "system and tools": ([SYSTEM, user("The weather?")], [WEATHER, WEATHER]),
    "tool calls": ([SYSTEM, *CALLED], [WEATHER]),
}


def prompt_ids(tokenizer, messages, tools):
    plain = [normalize(message, "test") for message in messages]
    return tokenizer.encode([tokenizer.render(plain, tools, generation_prompt=True)], ["test"])[0]
