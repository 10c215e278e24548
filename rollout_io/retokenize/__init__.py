"""Tokenization of text with a chat template, for conversations logged without token ids."""

from typing import TYPE_CHECKING

from schemas.imports import exports

if TYPE_CHECKING:
    from rollout_io.retokenize.encoding import encode_messages
    from rollout_io.retokenize.response import (
        ResponseTokens,
        Retokenized,
        encode_response,
        retokenize,
    )
    from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer

__all__ = [
    "ChatTokenizer",
    "ResponseTokens",
    "Retokenized",
    "encode_messages",
    "encode_response",
    "load_tokenizer",
    "retokenize",
]

__getattr__, __dir__ = exports(__name__, __file__, __all__)
