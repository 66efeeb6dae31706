"""Log-probabilities of a reply's tokens are given out as the tokens' text shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgeinfer.results import TokenLogprob
from edgeinfer.runtime.sampling import TokenLogprobs
from edgeinfer.runtime.text import TokenizerLike, bytes_of

__all__ = ["ShownLogprobs"]


class ShownLogprobs:
    """Matches log-probabilities with text, which may show later than its tokens come, or never, as a stop string does.

    Args:
        tokenizer: of the model.
        found: grows with the reply's tokens; stays empty where they are not asked for.
    """

    def __init__(self, tokenizer: TokenizerLike, found: Sequence[TokenLogprobs]) -> None:
        self._tokenizer = tokenizer
        self._found = found
        self._tokens = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._decoded = 0  # characters of the tokens so far
        self._shown = 0  # of those, that were shown

    def push(self, token: int, decoded: str) -> None:
        """Adds the reply's next token, and the text that became certain with it."""
        if not self._found:
            return
        found = self._found[self._tokens]
        self._tokens += 1
        alternatives = tuple(self._of(id_, logprob) for id_, logprob in found.top)
        entry = TokenLogprob(token, bytes_of(self._tokenizer, token), found.logprob, alternatives)
        self._waiting.append((self._decoded, entry))
        self._decoded += len(decoded)

    def show(self, text: str, *, rest: bool = False) -> tuple[TokenLogprob, ...]:
        """Gives those of the tokens that this text, the next to be shown, starts to show.

        Args:
            rest: those of all tokens that wait, at the end of a reply without a stop string.
        """
        self._shown += len(text)
        shown = []
        while self._waiting and (rest or self._waiting[0][0] < self._shown):
            shown.append(self._waiting.popleft()[1])
        return tuple(shown)

    def _of(self, token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token, bytes_of(self._tokenizer, token), logprob)
