"""Look for the cause of differences that no candidate explains: another prompt, or rounded weights.

Each possible cause needs separate forward passes. It is tried on a few rows first, and on all
others only if it explains at least one of them. A harness that renders prompts again, with another
chat template or without the system prompt, stores tokens that the engine never received.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch

from pipelines.frames import ROUTING
from rollout_io.retokenize.chat_template import TEMPLATES, find_template, normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import RolloutError
from trainer.forensics.audit.hypotheses import PENALTY, UNRELATED_FACTOR, Hypothesis, Noise, Span
from trainer.forensics.audit.rows import AuditRows, to_audit_rows
from trainer.forensics.audit.scores import TokenScores
from trainer.forensics.audit.weights import Weights
from trainer.models.policy import Policy

TRIED_ROWS = 8
"""Number of rows on which every cause is tried."""
UNUSUAL = 6.0
"""A fault in the version remains open if it leaves this multiple of the usual mean difference."""
MOST_COMPUTED, LEAST_COMPUTED = 6.0, 2.0
"""Differences of an engine that computes in bfloat16 are 3 to 5 times those of rounded weights (vLLM,
SmolLM2); if the noise of the dataset exceeds twice those, all its engines compute in that precision."""
COMPUTED = ("bfloat16", "float16")
"""Precisions in which engines also compute: rounded weights then explain a part of the differences."""


PROMPT = "prompt"


PromptsOf = Callable[[list[int], str | None], Mapping[str, list[int]]]
"""Maps a prompt and its messages to the prompts to try, by name."""


@dataclass(slots=True)
class Search:
    """A search for the causes of faults that no candidate explains; it replaces `verdicts`."""

    rows: AuditRows
    spans: Mapping[int, Span]
    verdicts: dict[int, Hypothesis]
    noise: Noise
    weights: Weights
    # Of spans, by precision: the log-likelihood that rounding the weights gains with the best larger
    # noise, and the scales of the differences from unrounded weights, and between both weights.
    roundings: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)

    def run(self, variants: PromptVariants | None) -> None:
        """Try to explain every span whose verdict names no cause, or only a part of it."""
        unusual = UNUSUAL * self.noise.mean_difference
        by_label: dict[int, list[int]] = {}
        for number, verdict in self.verdicts.items():
            # Rounding reverts part of a small update, so the previous version may fit better than the label.
            is_partial = verdict.kind in {"version", "swap"} and verdict.mean_difference > unusual
            if is_partial or verdict.kind in {"noise", "unknown_model"}:
                label = self.spans[number].label
                by_label.setdefault(verdict.weights if label is None else label, []).append(number)
        for label, numbers in by_label.items():
            policy = self.weights.policy(label)
            if variants is not None:
                self._attempt(PROMPT, label, numbers, policy, variants.of)
            for precision in PRECISIONS:
                changed = rounded(policy, precision)
                self._attempt(precision, label, numbers, changed, lambda ids, _: {"": ids})
        self._settle()

    def _attempt(
        self, cause: str, label: int, numbers: list[int], policy: Policy, prompts_of: PromptsOf
    ) -> None:
        """Replace the verdicts of spans that another prompt or precision (`cause`) explains better."""
        rows, row_of = self.rows, self.rows.spans[:, 0]
        # Recorded experts belong to the stored prompt's tokens.
        table = rows.table.drop([ROUTING] * (cause == PROMPT), strict=False)
        messages = table["messages"] if "messages" in table.columns else [None] * len(table)
        by_scale = sorted(numbers, key=lambda number: self.verdicts[number].scale)
        origins = list(dict.fromkeys(row_of[by_scale].tolist()))
        wanted, tried = set(numbers), origins[:: -(-len(origins) // TRIED_ROWS)]
        helpful: set[str] | None = None
        for part in (tried, [row for row in origins if row not in tried]):
            copies = [
                (row, name, prompt)
                for row in part
                for name, prompt in prompts_of(
                    rows.prompts.row(row).tolist(), messages[row]
                ).items()
                if helpful is None or name in helpful
            ]
            if not copies:
                return
            index, names, prompts = zip(*copies, strict=True)
            prompt = pl.Series(prompts, dtype=table.schema["prompt_token_ids"])
            changed = table[list(index)].with_columns(prompt_token_ids=prompt)
            copied = to_audit_rows(changed, rows.mode, rows.defaults)
            scores = self.weights.score(label, copied, np.arange(len(copies)), policy)
            # The spans of a copy are those of its row, in the same order.
            pairs = zip(index, names, strict=True)
            spans = [(int(n), name) for row, name in pairs for n in np.flatnonzero(row_of == row)]
            helpful = set()
            for (number, name), of_copy in zip(spans, scores.values(), strict=True):
                if number in wanted and self._replaces(cause, number, label, of_copy, name):
                    helpful.add(name)

    def _replaces(
        self, cause: str, number: int, label: int, scores: TokenScores, name: str
    ) -> bool:
        """Replace a span's verdict, and return true, if other scores of its label explain it better."""
        span, verdict, noise = self.spans[number], self.verdicts[number], self.noise
        other = dataclasses.replace(span, scores={label: scores})
        fit, kind, reason = noise.fit(other.under(label)), "prompt", name
        if cause != PROMPT:  # the engine may also compute in this precision
            kind, reason = "noise", f"its weights rounded to {cause}"
            noisy = noise.noisy(fit)
            if cause in COMPUTED and label in span.scores:
                plain = noise.noisy(noise.fit(span.under(label)))
                change = plain.residuals._replace(difference=noisy.predicted - plain.predicted)
                rounding = (noisy.total - plain.total, plain.residuals.scale, change.scale)
                self.roundings.setdefault(cause, []).append(rounding)
            fit = max(fit, noisy, key=lambda one: one.total)
        gain = fit.total - verdict.total
        if gain <= PENALTY or noise.is_unrelated(fit):
            return False
        ratio = verdict.evidence["log_likelihood_ratio"] + gain
        evidence = {**verdict.evidence, "log_likelihood_ratio": ratio}
        self.verdicts[number] = fit._replace(kind=kind, reason=reason, evidence=evidence)
        return True

    def _settle(self) -> None:
        """Decide whether spans without a cause come from another precision, or from another model.

        An engine that computes in a lower precision also rounds the weights, so rounded weights fit
        its log-probabilities slightly better. If another model sampled the span, they fit no better.
        A single span rarely shows this, so all spans that were tried are judged together.
        """
        usual = self.noise.kappa
        limit = UNRELATED_FACTOR * usual
        for roundings in self.roundings.values():
            change = float(np.median([change for *_, change in roundings]))
            gain = sum(gain for gain, scale, _ in roundings if scale <= MOST_COMPUTED * change)
            if usual <= LEAST_COMPUTED * change and gain >= PENALTY:
                limit = max(limit, MOST_COMPUTED * change)
        for number, verdict in self.verdicts.items():
            if verdict.kind in {"noise", "unknown_model"} and not verdict.reason:
                kind = "noise" if verdict.residuals.scale <= limit else "unknown_model"
                self.verdicts[number] = verdict._replace(kind=kind)


@torch.no_grad()
def rounded(policy: Policy, precision: str) -> Policy:
    """Return a copy of a policy with weights rounded to one of `PRECISIONS`.

    8-bit precisions round matrices, with one scale for each of their rows.
    """
    policy, kind = copy.deepcopy(policy), PRECISIONS[precision]
    ends = (policy.model.get_output_embeddings(), policy.model.get_input_embeddings())
    unrounded = {id(layer.weight) for layer in ends if precision.endswith("except embeddings")}
    for weights in policy.parameters():
        if kind.itemsize > 1:
            weights.copy_(weights.to(kind))
        elif weights.ndim == 2 and id(weights) not in unrounded:
            largest = torch.iinfo(kind).max if kind == torch.int8 else torch.finfo(kind).max
            step = (weights.abs().amax(1, keepdim=True) / largest).clamp(min=1e-12)
            scaled = weights / step
            scaled = scaled.round() if kind == torch.int8 else scaled
            weights.copy_(scaled.to(kind).float() * step)
    return policy


PRECISIONS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "8-bit integers": torch.int8,
    "8-bit integers except embeddings": torch.int8,
    "8-bit floats except embeddings": torch.float8_e4m3fn,
}


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
)
"""System prompts that common chat templates add."""
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_WHERE = "prompt"


class PromptVariants:
    """Renders prompts as a faulty harness might have rendered them.

    Args:
        tokenizer: The tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        one = [{"role": "user", "content": "the-user-text"}]
        without, with_header = (
            _rendered(tokenizer, one, generation_prompt=prompt) for prompt in (False, True)
        )
        self._header = with_header.removeprefix(without) if with_header != without else ""
        self._user = self._header.replace("assistant", "user", 1)
        texts = {"with the template's system prompt": without}
        for system in SYSTEM_PROMPTS:
            chat = [{"role": "system", "content": system}, *one]
            text = _rendered(tokenizer, chat, generation_prompt=False)
            texts[f"with the system prompt {system!r}"] = text
        # What precedes the first user message, by name.
        self._systems = {
            name: text.partition(self._user)[0]
            for name, text in texts.items()
            if self._user and self._user in text
        }

    def of(self, ids: Sequence[int], messages: str | None) -> dict[str, list[int]]:
        """Return the variants of a prompt by name, except variants that equal the prompt.

        Args:
            ids: The stored prompt.
            messages: JSON of the messages that were sent, or None.
        """
        text = self._tokenizer.decode(ids)
        texts = {**dict(self._from_messages(messages)), **dict(self._edits(text))}
        texts["with its text tokenized again"] = text
        try:
            encoded = self._tokenizer.encode(list(texts.values()), list(texts))
        except RolloutError:
            return {}
        by_tokens = {tuple(ids): "", (): ""}
        for name, tokens in zip(texts, encoded, strict=True):
            by_tokens.setdefault(tuple(tokens), name)
        return {name: list(tokens) for tokens, name in by_tokens.items() if name}

    def _edits(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each edited version of a prompt."""
        if self._header and text.endswith(self._header):
            yield "without the generation prompt", text.removesuffix(self._header)
            yield "with an empty thinking block", f"{text}<think>\n\n</think>\n\n"
        elif self._header:
            yield "with the generation prompt", text + self._header
        if self._user and self._user in text:
            user = text[text.index(self._user) :]
            yield "without the system prompt", user
            yield from ((name, block + user) for name, block in self._systems.items() if block)
        if end := self._tokenizer.eos_token:
            yield "without newlines after messages", text.replace(f"{end}\n", end)
            split = re.sub(f"{re.escape(end)}(?!\n)", f"{end}\n", text)
            yield "with newlines after messages", split
        if begin := self._tokenizer.backend.bos_token:
            yield "with another beginning-of-sequence token", begin + text
            yield "without a beginning-of-sequence token", text.removeprefix(begin)
        yield "without thinking in earlier answers", _THINKING.sub("", text)

    def _from_messages(self, messages: str | None) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each rendering of the stored messages."""
        try:
            stored = json.loads(messages or "null")
            plain = [normalize(message, _WHERE) for message in stored]
        except (TypeError, ValueError, RecursionError):  # not a list of messages
            return
        tokenizers = {"the tokenizer's chat template": self._tokenizer}
        for template in TEMPLATES:
            backend = copy.copy(self._tokenizer.backend)
            backend.chat_template = find_template(template)
            changed = dataclasses.replace(self._tokenizer, backend=backend)
            tokenizers[f"the template {template}"] = changed
        for name, tokenizer in tokenizers.items() if plain else ():
            if text := _rendered(tokenizer, plain, generation_prompt=True):
                yield f"rendered with {name}", text


def _rendered(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool
) -> str:
    """Render messages; empty if the template cannot."""
    try:
        return tokenizer.render(messages, generation_prompt=generation_prompt, where=_WHERE)
    except RolloutError:
        return ""
