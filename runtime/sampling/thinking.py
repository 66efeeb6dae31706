"""A limit on what a reasoning model thinks before it answers: behind so many tokens the end of the thought is forced.
The end tag is the only token that may follow then, so that drafts of it are free (budget forcing, arXiv 2501.19393)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.sampling.constraint import ConstraintPlaces, TextPlaces
from edgeinfer.runtime.text.contract import TokenizerLike

# What models write around a thought; of Qwen3, DeepSeek-R1 and SmolLM3, of Magistral, and of Seed-OSS.
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
# Pieces of tokens that are kept.
_KEPT = 4096


def thinking_tags(tokenizer: TokenizerLike) -> tuple[str, str]:
    """The tags around a thought: those that are tokens of the vocabulary, else <think> and </think>, spelled out."""
    return next((pair for pair in _TAGS if all(tokenizer.token_to_id(tag) is not None for tag in pair)), _TAGS[0])


@dataclass(frozen=True)
class _Place:
    """Where a text is: inside a thought, its tokens so far, how many match the end tag, and characters that may begin a
    tag."""

    inside: bool = False
    used: int = 0
    ending: int = 0
    tail: str = ""


class ThinkingBudget:
    """Implements `Constraint`: anything may follow except more of a thought that has had `budget` tokens. The prompt
    may end inside a thought, as in templates of some models."""

    def __init__(self, tokenizer: TokenizerLike, budget: int, prompt: Sequence[int]) -> None:
        self._tokenizer, self._budget = tokenizer, budget
        self._tags = thinking_tags(tokenizer)
        self._longest = max(map(len, self._tags))
        ids = [tokenizer.token_to_id(tag) for tag in self._tags]
        self._by_id = {} if None in ids else dict(zip(ids, self._tags, strict=True))
        end = ids[1] if self._by_id else None
        self._end_ids = [end] if end is not None else tokenizer.encode(self._tags[1], add_special_tokens=False)
        self._piece = lru_cache(_KEPT)(self._spelled)
        place = _Place()
        for token in prompt:
            place = self._after(place, token)
        # What the prompt has of a thought is not the reply's.
        self._places = [_Place(place.inside, tail=place.tail)]

    def allowed(self) -> NDArray[np.int64] | None:  # (1,)
        forced = self.forced()
        return np.array(forced[:1], np.int64) if forced else None

    def forced(self) -> Sequence[int]:
        """The rest of the end tag once the thought has used its tokens."""
        place = self._places[-1]
        full = place.inside and place.used - place.ending >= self._budget
        return self._end_ids[place.ending :] if full else ()

    def push(self, token: int) -> None:
        self._places.append(self._after(self._places[-1], token))

    def pop(self, count: int = 1) -> None:
        assert 0 <= count < len(self._places), "popping more tokens than were pushed"
        del self._places[len(self._places) - count :]

    def places(self) -> ConstraintPlaces:
        return TextPlaces(self)

    def _after(self, place: _Place, token: int) -> _Place:
        inside, used, text = place.inside, place.used + place.inside, place.tail + self._piece(token)
        ending = place.ending + 1 if token == self._end_ids[place.ending] else int(token == self._end_ids[0])
        while (found := text.find(self._tags[inside])) >= 0:
            text = text[found + len(self._tags[inside]) :]
            inside, used, ending = not inside, 0, 0
        if ending == len(self._end_ids):  # although its tokens, one by one, decode to another text
            inside, used, ending = False, 0, 0
        return _Place(inside, used, ending * inside, text[max(len(text) - self._longest + 1, 0) :])

    def _spelled(self, token: int) -> str:
        """The text of a token that may be part of a tag; where tags are tokens, other text is none."""
        if self._by_id:
            return self._by_id.get(token, "")
        return self._tokenizer.decode([token], skip_special_tokens=False)
