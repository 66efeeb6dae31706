"""What may follow in a reply that thinks before it answers: any thought up to a limit, then its end, then whatever
another constraint allows. Behind the limit only the end may follow, so that drafts of it are free (budget forcing,
arXiv 2501.19393)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ThoughtEnd
from edgeinfer.runtime.sampling.constraint import Constraint, ConstraintPlaces, TextPlaces
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.text.thoughts import FORMATS, ThoughtStart, ThoughtTags

# Pieces of tokens that are kept.
_KEPT = 4096
# A thought goes in circles where of its last `_RECENT` tokens nearly all stand in groups of `_GROUP` that occurred this
# often among the last `_LOOKED_AT`; it is measured every `_EVERY` tokens.
_GROUP, _OFTEN, _RECENT, _LOOKED_AT, _EVERY, _SHARE = 8, 4, 512, 4096, 64, 0.95
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def repetition(tokens: Sequence[int]) -> float:
    """The share of the last tokens that stand in groups which occur again and again; 0 for a short text."""
    if len(tokens) < _RECENT:
        return 0.0
    ids = np.array(tokens[-_LOOKED_AT:], np.uint64) + np.uint64(1)  # (T,)
    groups = np.zeros(len(ids) - _GROUP + 1, np.uint64)  # (T - _GROUP + 1,)
    for place in range(_GROUP):
        groups = groups * _FACTOR + ids[place : place + len(groups)]
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return float((counts[inverse[-_RECENT + _GROUP - 1 :]] >= _OFTEN).mean())


@dataclass(frozen=True)
class _Place:
    """Where a text is: inside a thought, its tokens so far, how many match the end tag, and characters that may begin a
    tag."""

    inside: bool = False
    used: int = 0
    ending: int = 0
    tail: str = ""
    fresh: bool = False  # nothing of the reply is there but what may become a thought
    left: Sequence[int] = ()  # what must follow of an end that is forced
    end: ThoughtEnd | None = None  # of the latest thought: what ended it, or is about to
    fed: bool = False  # whether the other constraint was given the latest token


class ThoughtConstraint:
    """Implements `Constraint`: anything may follow except more of a thought than is allowed.

    Args:
        tags: around thoughts.
        place: where the reply begins.
        budget: tokens that each thought may have; None is any number.
        closing: text that is forced before the end of a thought that is cut short.
        inner: what must follow the thought, if there is one.
        end_ids: the stop tokens, which do not follow a thought where an answer must come.
        vocab_size: the number of tokens.
        watched: whether a thought that goes in circles is ended.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        tags: ThoughtTags,
        start: ThoughtStart,
        *,
        budget: int | None = None,
        closing: str = "",
        inner: Constraint | None = None,
        end_ids: Collection[int] = (),
        vocab_size: int = 0,
        watched: bool = False,
    ) -> None:
        self._tokenizer, self._tags, self._budget = tokenizer, tags, budget
        self._inner, self._watched, self._asked = inner, watched, False
        self._longest = max(len(tags.start), len(tags.end))
        self._end_ids = tags.end_ids
        self._closing = [*(tokenizer.encode(closing, add_special_tokens=False) if closing else ()), *self._end_ids]
        self._piece = lru_cache(_KEPT)(self._spelled)
        opens = start.may_open and tags.offered and tags.start_id is not None
        self._free: NDArray[np.int64] | None = None
        if inner is not None:
            self._free = np.setdiff1d(np.arange(vocab_size), np.array([*end_ids], np.int64))
        self._start_ids = np.array([tags.start_id] if opens and inner is not None else (), np.int64)
        self._places = [_Place(start.inside, fresh=opens)]
        self._tokens: list[int] = []

    @property
    def end(self) -> ThoughtEnd | None:
        """What ended the latest thought; None where none has ended."""
        return None if self.inside else self._places[-1].end

    @property
    def inside(self) -> bool:
        """Whether the text is inside a thought."""
        return self._places[-1].inside

    def end_thought(self) -> None:
        """End the thought with the next token, if the reply is inside one. Safe from any thread."""
        self._asked = True

    def allowed(self) -> NDArray[np.int64] | None:  # (A,)
        place = self._places[-1]
        if place.inside:
            due = self._due(place)
            return np.array(due[:1], np.int64) if due else self._free
        if self._inner is None:
            return None
        ids = self._inner.allowed()
        return np.union1d(ids, self._start_ids) if place.fresh and ids is not None else ids

    def forced(self) -> Sequence[int]:
        """The rest of an end that must follow, or what the other constraint forces."""
        place = self._places[-1]
        if place.inside:
            return self._due(place)
        return () if self._inner is None or place.fresh else self._inner.forced()

    def push(self, token: int) -> None:
        before = self._places[-1]
        self._tokens.append(token)
        place = self._after(before, token)
        if self._inner is not None and not (before.inside or place.inside):
            self._inner.push(token)
            place = _Place(end=place.end, fed=True)
        self._places.append(place)

    def pop(self, count: int = 1) -> None:
        assert 0 <= count < len(self._places), "popping more tokens than were pushed"
        if not count:
            return
        if self._inner is not None:
            self._inner.pop(sum(place.fed for place in self._places[-count:]))
        del self._places[-count:]
        del self._tokens[-count:]

    def places(self) -> ConstraintPlaces:
        return TextPlaces(self)

    def _due(self, place: _Place) -> Sequence[int]:
        """What must follow inside a thought; empty where there is a choice."""
        if place.left:
            return place.left
        if self._asked or place.end is not None or self._full(place):
            return self._end_ids[place.ending :] if place.ending else self._closing
        return ()

    def _full(self, place: _Place) -> bool:
        return self._budget is not None and place.used - place.ending >= self._budget

    def _after(self, place: _Place, token: int) -> _Place:
        inside, used, text = place.inside, place.used + place.inside, place.tail + self._piece(token)
        due = self._due(place) if inside else ()
        left = due[1:] if due and token == due[0] else ()
        ending = place.ending + 1 if token == self._end_ids[place.ending] else int(token == self._end_ids[0])
        end = place.end
        if due and end is None:
            end = "request" if self._asked and not self._full(place) else "budget"
        tags = (self._tags.start, self._tags.end)
        # Behind an answer's beginning another constraint rules.
        opens = self._inner is None or place.fresh
        while (inside or opens) and (found := text.find(tags[inside])) >= 0:
            text = text[found + len(tags[inside]) :]
            end = None if not inside else end or "model"
            inside, used, ending, left = not inside, 0, 0, ()
        if inside and ending == len(self._end_ids):  # although its tokens, one by one, decode to another text
            inside, used, ending, left, end = False, 0, 0, (), end or "model"
        if inside and end is None and self._watched and used >= _RECENT and used % _EVERY == 0:
            end = "repetition" if repetition(self._tokens[-used:]) >= _SHARE else None
        tail = text[max(len(text) - self._longest + 1, 0) :]
        return _Place(inside, used, ending * inside, tail, left=left if inside else (), end=end)

    def _spelled(self, token: int) -> str:
        """The text of a token that may be part of a tag; where tags are tokens, other text is none."""
        mark = self._tags.mark(token)
        if mark or self._tags.start_id is not None:
            return mark
        return self._tokenizer.decode([token], skip_special_tokens=False)


def thought_limit(tokenizer: TokenizerLike, budget: int, prompt: Sequence[int]) -> ThoughtConstraint:
    """A limit on thoughts alone, for a text that is no chat: it may end inside a thought, and have further ones."""
    tags = ThoughtTags.of(None, tokenizer) or ThoughtTags(FORMATS[0], tokenizer)
    read = ThoughtConstraint(tokenizer, tags, ThoughtStart(False, True))
    for token in prompt:
        read.push(token)
    # What the prompt has of a thought is not the reply's.
    return ThoughtConstraint(tokenizer, tags, ThoughtStart(read.inside, True), budget=budget)
