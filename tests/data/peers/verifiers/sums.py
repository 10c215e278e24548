"""A verifiers v1 plugin: small sums, and an in-process harness that compacts its context."""

import re

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.semantic import ACP_MODEL_REQUEST_ID_HEADER, SemanticEdge, SemanticEdgeSet

__all__ = ["Sum", "SumHarness", "Sums"]

SYSTEM = "You answer with one number."
SUMMARIZE = "Write the question and your answer in one sentence."


class SumData(vf.TaskData):
    answer: int
    style: str


class Sum(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace) -> float:
        return float(str(self.data.answer) in re.findall(r"\d+", trace.last_reply))

    @vf.reward(weight=0.25)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) < 40)

    @vf.metric
    async def reply_chars(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum]):
    def load(self):
        for style, a, b in [("turns", 2, 3), ("compact", 4, 1), ("fails", 1, 1)]:
            prompt = f"What is {a} + {b}?"
            fields = {"name": f"{a}+{b}", "prompt": prompt, "system_prompt": SYSTEM}
            yield Sum(SumData(**fields, answer=a + b, style=style), self.config.task)


class SumHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, _runtime, endpoint, secret, _mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        chat = Chat(AsyncOpenAI(base_url=endpoint, api_key=secret), ctx.model)
        opening = [{"role": "system", "content": system}] if system else []
        if not isinstance(prompt, str):
            await chat.ask([*opening, *(message_to_wire(m) for m in prompt)])
            return ProgramResult(0, "", "")
        style = getattr(data, "style", "turns")
        context = await chat.turns(opening, [prompt, "Are you sure? One number."])
        if style == "compact":
            trace.add_semantic_edges(await chat.compact(opening, context, prompt))
        return ProgramResult(int(style == "fails"), "", "the program broke")


class Chat:
    """Calls to the interception server, each with a request id for semantic edges."""

    def __init__(self, client, model):
        self.client, self.model, self.num_calls = client, model, 0

    async def ask(self, messages):
        header = {ACP_MODEL_REQUEST_ID_HEADER: f"call-{self.num_calls}"}
        self.num_calls += 1
        request = {"model": self.model, "messages": messages, "extra_headers": header}
        reply = await self.client.chat.completions.create(**request)
        return {"role": "assistant", "content": reply.choices[0].message.content or ""}

    async def turns(self, context, questions):
        for question in questions:
            context = [*context, {"role": "user", "content": question}]
            context.append(await self.ask(context))
        return context

    async def compact(self, opening, context, prompt):
        """Two attempts at a summary; the first is dropped, a new context begins with the second."""
        asked = [*context, {"role": "user", "content": SUMMARIZE}]
        attempts = [await self.ask(asked), await self.ask(asked)]
        resumed = f"Earlier: {attempts[1]['content']}\n{prompt}"
        await self.turns(opening, [resumed])
        links = [(1, 2, "compaction_attempt"), (1, 3, "compaction_attempt"), (3, 4, "compaction")]
        return SemanticEdgeSet(edges=[edge(*link) for link in links])


def edge(source, target, kind):
    ids = {"source_request_id": f"call-{source}", "target_request_id": f"call-{target}"}
    return SemanticEdge(**ids, type=kind)
