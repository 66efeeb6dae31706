"""From logits to a token: penalties, constraints, truncation, position-keyed draw; grammars by their own modules."""

from __future__ import annotations
