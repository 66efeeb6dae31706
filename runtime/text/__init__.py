"""Text in and out: tokenizer, streaming detokenizer, stop strings; chat templates, which few programs need, by their
own modules."""

from __future__ import annotations
