"""Text in and out: tokenizer, streaming detokenizer, stop strings, chat templates."""

from __future__ import annotations

from edgeinfer.runtime.text.contract import TokenizerLike, bytes_of, longest_token, surely_longer
from edgeinfer.runtime.text.control_marks import LiteralEncoder
from edgeinfer.runtime.text.guarded_template import GuardedTemplate
from edgeinfer.runtime.text.streaming import ReplyText, StopMatcher, StreamDecoder
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.runtime.text.tokenizer import Tokenizer
from edgeinfer.runtime.text.transient import TransientTokenizer, tokenizer_facts

__all__ = [
    "ChatTemplate",
    "GuardedTemplate",
    "LiteralEncoder",
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
]
