"""The simplest RL loop: plain Transformers, padded batches, one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Reward = Callable[[str, Any], float]
"""Scores a response's text for a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NaiveLoop:
    """Group-relative policy gradient with one optimizer step per iteration.

    Attributes:
        model: Hugging Face model directory.
        group_size: Samples per prompt.
        max_response_tokens: Maximum length of a sample.
        learning_rate: Learning rate of AdamW, without weight decay.
        seed: Seed for sampling.
    """

    model: str
    group_size: int = 4
    max_response_tokens: int = 20
    learning_rate: float = 5e-6
    seed: int = 0

    def run(
        self,
        batches: Sequence[Sequence[tuple[str, Any]]],
        reward: Reward,
        evaluate: Callable[[Any, Any], float],
        every: int,
    ) -> Iterator[dict[str, float]]:
        """Train on one batch of (prompt, task) after another.

        Yields:
            After each update, its seconds and the mean reward of its samples; after every `every`
            updates also `held_out`, the result of `evaluate(model, tokenizer)`, which is not timed.
        """
        torch.manual_seed(self.seed)
        tokenizer = AutoTokenizer.from_pretrained(self.model, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.0)
        for number, batch in enumerate(batches, 1):
            start = time.perf_counter()
            mean = self._update(model, tokenizer, optimizer, batch, reward)
            line = {"seconds": time.perf_counter() - start, "return_mean": mean}
            if number % every == 0:
                line["held_out"] = evaluate(model, tokenizer)
            yield line

    def _update(
        self,
        model: Any,
        tokenizer: Any,
        optimizer: torch.optim.Optimizer,
        batch: Sequence[tuple[str, Any]],
        reward: Reward,
    ) -> float:
        texts, sequences, num_prompt = self.sample(model, tokenizer, [text for text, _ in batch])
        tasks = [task for _, task in batch for _ in range(self.group_size)]
        rewards = torch.tensor([reward(t, task) for t, task in zip(texts, tasks, strict=True)])
        grouped = rewards.view(-1, self.group_size)
        spread = grouped.std(dim=1, keepdim=True)
        advantages = ((grouped - grouped.mean(dim=1, keepdim=True)) / (spread + 1e-6)).flatten()
        padded = sequences == tokenizer.pad_token_id
        mask = ~padded
        mask[:, num_prompt:] |= _ends(padded[:, num_prompt:])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(sequences, attention_mask=mask.long(), position_ids=positions).logits
        logprobs = logits[:, num_prompt - 1 : -1].float().log_softmax(-1)
        chosen = logprobs.gather(-1, sequences[:, num_prompt:, None])[..., 0]
        trained = mask[:, num_prompt:]
        loss = -(advantages[:, None] * chosen * trained).sum() / trained.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(rewards.mean())

    @torch.no_grad()
    def sample(
        self, model: Any, tokenizer: Any, prompts: Sequence[str]
    ) -> tuple[list[str], torch.Tensor, int]:
        """Sample `group_size` texts per prompt.

        Returns the texts, the padded token ids of prompts and texts, and the padded prompt length.
        """
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in prompts
        ]
        inputs = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
        sequences = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=self.group_size,
            max_new_tokens=self.max_response_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        num_prompt = inputs["input_ids"].shape[1]
        texts = tokenizer.batch_decode(sequences[:, num_prompt:], skip_special_tokens=True)
        return texts, sequences, num_prompt


def _ends(padded: torch.Tensor) -> torch.Tensor:
    """Mark the first pad token of each row, which was sampled if EOS is used as the pad token."""
    return padded & (padded.cumsum(-1) == 1)
