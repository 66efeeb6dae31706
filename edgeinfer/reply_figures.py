"""What a reply gives out besides its text: log-probabilities of the tokens shown, and how long its steps took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from edgeinfer.results import Timings, TokenLogprob
from edgeinfer.runtime.sampling.distributions import TokenLogprobs
from edgeinfer.runtime.text.contract import TokenizerLike, bytes_of


class ShownLogprobs:
    """Matches log-probabilities with text, which may show later than its tokens come, or never, as a stop string does.

    Args:
        tokenizer: of the model.
        found: grows with the reply's tokens; stays empty where they are not asked for.

    Attributes:
        given: of all text that was shown.
    """

    def __init__(self, tokenizer: TokenizerLike, found: Sequence[TokenLogprobs]) -> None:
        self._tokenizer = tokenizer
        self._found = found
        self.given: list[TokenLogprob] = []
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
        self.given += shown
        return tuple(shown)

    def _of(self, token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token, bytes_of(self._tokenizer, token), logprob)


def timings_of(step_ms: Sequence[float], load_ms: float, prompt_ms: float, cached: int) -> Timings:
    """The figures.

    Args:
        cached: tokens of the prompt that were not evaluated again.
    """
    later = np.array(step_ms[1:])
    mean = float(later.mean()) if len(later) else 0.0
    p50, p95 = (float(p) for p in np.percentile(later, (50, 95))) if len(later) else (0.0, 0.0)
    return Timings(
        load_ms=load_ms,
        prompt_ms=prompt_ms,
        ttft_ms=step_ms[0] if step_ms else 0.0,
        per_token_ms=mean,
        per_token_p50_ms=p50,
        per_token_p95_ms=p95,
        tokens_per_second=1e3 / mean if mean else 0.0,
        cached_prompt_tokens=cached,
    )
