"""Lists of choices as tries of a model's tokens; the last one is kept, as programs ask for the same one each time."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from edgeinfer.errors import UsageError
from edgeinfer.runtime.sampling import ChoiceTrie
from edgeinfer.runtime.text import LiteralEncoder, TokenizerLike

__all__ = ["ChoiceLists"]


class ChoiceLists:
    """The tries of one model's choices. Safe from any thread.

    Args:
        tokenizer, encoder: of the model.
        vocab_size: tokens that it has logits for.
    """

    def __init__(self, tokenizer: TokenizerLike, encoder: LiteralEncoder, vocab_size: int) -> None:
        self._tokenizer, self._encoder, self._vocab_size = tokenizer, encoder, vocab_size
        self._lock = Lock()
        self._last: tuple[object, ChoiceTrie] | None = None

    def trie(self, texts: tuple[str, ...], end_ids: Sequence[int], parse_special: bool) -> ChoiceTrie:
        """The trie of a list.

        Args:
            end_ids: stop tokens of the reply.
            parse_special: special tokens spelled out in a choice become those tokens.

        Raises:
            UsageError: a choice cannot be made of the model's tokens.
        """
        key = (texts, tuple(end_ids), parse_special)
        with self._lock:
            if self._last is None or self._last[0] != key:
                self._last = None  # two large ones are not held at a time
                self._last = key, ChoiceTrie([self._encoded(text, parse_special) for text in texts], end_ids)
            return self._last[1]

    def _encoded(self, text: str, parse_special: bool) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False) if parse_special else self._encoder.literal(text)
        if max(ids, default=0) >= self._vocab_size:
            message = f"The choice {text!r} contains a token id outside the model's vocabulary of {self._vocab_size}."
            raise UsageError(message, "Leave it out, or spell it differently.")
        return ids
