"""Text in and out: tokenizer, streaming detokenizer, stop strings; chat templates, which few programs need, by their
own modules."""

from __future__ import annotations

from edgeinfer.runtime.text.contract import TokenizerLike, bytes_of, longest_token, surely_longer, vocabulary_digest
from edgeinfer.runtime.text.control_marks import LiteralEncoder
from edgeinfer.runtime.text.mapped import MappedTokenizer
from edgeinfer.runtime.text.stopping import CallMark, StopMatcher
from edgeinfer.runtime.text.streaming import ReplyText, StreamDecoder
from edgeinfer.runtime.text.tokenizer import Tokenizer
from edgeinfer.runtime.text.transient import TransientTokenizer, tokenizer_facts

__all__ = [
    "CallMark",
    "LiteralEncoder",
    "MappedTokenizer",
    "ReplyText",
    "StopMatcher",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerLike",
    "TransientTokenizer",
    "bytes_of",
    "longest_token",
    "surely_longer",
    "tokenizer_facts",
    "vocabulary_digest",
]
