"""Drafts what is there already: what a grammar forces, and continuations of earlier places of the same text."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.profile.costs import Prior
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Drafter, Guess, Round
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod
from edgeinfer.runtime.speculation.drafters.text_index import NONE, Aligner, Cursor, Evidence, SuffixIndex


class ForcedDrafter(Drafter):
    """Proposes what `context.forced` says, whatever the model thinks."""

    name = "forced"
    # The target's own choice goes by the same constraint: of a closed list nothing else can come, of a grammar nothing
    # but another spelling of the same text, and how often that comes is learnt.
    priors: Sequence[float] = (0.999,)

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        """The token that must follow, or spells what must; or nothing."""
        forced = context.forced(drafted)
        return (Guess(forced[0], 0),) if forced else ()

    def for_sequence(self, cache: KVCache) -> ForcedDrafter:
        return ForcedDrafter()


# Signs of the source's next token combine four things, each with the upper edges of its buckets, the last one open:
# tokens of agreement since the last miss;
_RUNS = (0, 1, 2, 3, 5, 8, 14, 24)
# doubts: where nothing was missed lately, how many committed tokens were foretold; else how much was missed;
_PROVEN = (0, 3)
_MISSES = (0.4, 0.9, 1.5, 3.0)
# the kind: the source's own token, that of a substitution not confirmed yet, that of a confirmed one; and whether the
# conversation's last token has been followed by one and the same each time.
#
# Their acceptance in a simulation of 230 dialogues with the built-in model is that of a logistic model with these
# terms, less the last. Fitted on one half of the dialogues, it drafted on the other half like what was learnt there.
_BY_RUN = (-3.0, -1.39, -0.65, 0.05, 0.55, 1.2, 1.34, 1.21, 1.83)
_BY_DOUBT = (-1.24, 0.18, 0.71, 1.13, 1.06, 0.23, -0.94)
_BY_KIND = (1.01, -0.99, 1.11)
_BY_SURENESS = (0.0, 0.8)
_CAUTION = 0.5
_SOURCE_PRIORS = tuple(
    1 / (1 + math.exp(_CAUTION - sum(terms))) for terms in product(_BY_RUN, _BY_DOUBT, _BY_KIND, _BY_SURENESS)
)
# Further signs: the exact match's token where the source's is another, by the match's length; the source's own token
# where a substitution is made. Each came once in ten times. The last sign is of a reply's second token, where only the
# first is known to stand in the text: 199 of 316 answers whose first token their instruction has go on as that does.
_LENGTHS = (2, 3, 5, 9)
_MATCHED = len(_SOURCE_PRIORS)
_UNREPLACED = _MATCHED + len(_LENGTHS) + 1
_STARTED = _UNREPLACED + 1
_PRIORS = (*_SOURCE_PRIORS, *(0.1,) * (len(_LENGTHS) + 2), 0.6)
# Nothing but the last token speaks for a place.
_FIRST_TOKEN = Evidence.of_match(1)


class _Place(NamedTuple):
    """What is known behind text and path: where the longest exact match goes on, its length, and the cursor."""

    position: int
    length: int
    cursor: Cursor | None


class CopyDrafter(Drafter):
    """Repeats the conversation: what followed the longest earlier match, kept in step through changes.

    After `begin` the guess is the continuation of the longest match (CopySpec, algorithms.md C2). Where there is none,
    the reply's first token may begin an edit of the prompt's own text: the guess follows what stood behind that token
    last. While the reply repeats a source it follows that source (C4), until a longer match turns up.
    """

    name = "copy"
    copies = True
    priors: Sequence[float] = _PRIORS
    branches = True

    def __init__(self) -> None:
        self._index = SuffixIndex()
        self._aligner = Aligner(self._index)
        # Of every path that was asked about since the last round.
        self._places: dict[tuple[int, ...], _Place] = {(): _Place(NONE, 0, None)}

    def begin(self, tokens: Sequence[int]) -> None:
        """Indexes what is new of a prompt; substitutions of the last generation are forgotten."""
        self._index.replace(tokens)
        self._aligner.forget()
        position, length = self._index.longest()
        if not length:
            position, length = self._index.latest_of_last()
        cursor = self._aligner.place(position, (), Evidence.of_match(length)) if length else None
        self._places = {(): _Place(position, length, cursor)}

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        """The source's next token or its replacement, then the exact match's, then the source's own."""
        path = tuple(drafted)
        place = self._places.get(path) or self._behind(path)
        cursor = place.cursor
        if cursor is None:
            return []
        last = path[-1] if path else self._index.tokens[-1]
        sign = _STARTED if not path and cursor.evidence == _FIRST_TOKEN else self._sign(cursor, last)
        found = [Guess(cursor.token, sign)]
        if width == 1:
            return found
        if place.length and (token := self._at(place.position, path)) != cursor.token:
            found.append(Guess(token, _MATCHED + bisect_left(_LENGTHS, place.length)))
        if cursor.substitution is not None and cursor.done == 0:
            own = cursor.substitution.span[0]
            if all(own != guess.token for guess in found):
                found.append(Guess(own, _UNREPLACED))
        return found[:width]

    def observe(self, round: Round) -> None:
        """Follow the committed tokens, and learn what they replaced."""
        place = self._places[()]
        for token in round.committed:
            place = self._after(place, token, (token,), committed=True)
            self._index.append(token)
        self._places = {(): place}

    def for_sequence(self, cache: KVCache) -> CopyDrafter:
        return CopyDrafter()

    def nbytes(self) -> int:
        return self._index.nbytes() + self._aligner.nbytes()

    def close(self) -> None:
        self.begin(())

    def _at(self, position: int, path: Sequence[int]) -> int:
        size = len(self._index)
        return self._index.tokens[position] if position < size else path[position - size]

    def _behind(self, path: tuple[int, ...]) -> _Place:
        """What is known behind a path, kept for the paths that go on from there."""
        known = len(path)
        while path[:known] not in self._places:
            known -= 1
        place = self._places[path[:known]]
        for end in range(known + 1, len(path) + 1):
            place = self._after(place, path[end - 1], path[:end], committed=False)
            self._places[path[:end]] = place
        return place

    def _after(self, place: _Place, token: int, path: Sequence[int], *, committed: bool) -> _Place:
        """What is known after one more token, the last of the path."""
        position, length, cursor = place
        if length and token == self._at(position, path):
            # The latest of the longest matches stays that: whatever else agrees now agreed before.
            position, length = position + 1, length + 1
        else:
            position, length = self._index.longest(path)
        if cursor is not None:
            cursor = self._aligner.advance(cursor, token, path, committed=committed)
        if length and (cursor is None or _beaten(cursor, position, length)):
            before = cursor.evidence if cursor is not None else None
            cursor = self._aligner.place(position, path, Evidence.of_match(length, before))
        return _Place(position, length, cursor)

    def _sign(self, cursor: Cursor, last: int) -> int:
        run, _, misses, proven = cursor.evidence
        missed = bisect_left(_MISSES, misses)
        doubt = len(_PROVEN) + missed if missed else bisect_left(_PROVEN, proven)
        rule = cursor.substitution
        kind = 0 if rule is None else 1 if rule.hits == 0 else 2
        sure = self._index.only_successor(last) != NONE
        sign = bisect_left(_RUNS, run) * len(_BY_DOUBT) + doubt
        return (sign * len(_BY_KIND) + kind) * len(_BY_SURENESS) + sure


def _beaten(cursor: Cursor, position: int, length: int) -> bool:
    """Whether a match elsewhere speaks for its place louder than all evidence does for the cursor's."""
    elsewhere = cursor.position != position and cursor.done == 0  # a replacement is finished first
    return elsewhere and length > max(cursor.evidence.run, cursor.evidence.trust)


METHODS = (
    DrafterMethod(
        name="forced",
        help="tokens that a grammar or a list of choices leaves no choice about",
        make=lambda parts: ForcedDrafter(),
        in_auto=lambda parts: True,
        free=True,
        order=0,
    ),
    DrafterMethod(
        name="copy",
        help="continuations of earlier places of the same text, through substitutions",
        make=lambda parts: CopyDrafter(),
        in_auto=lambda parts: True,
        # Shares of the rounds left to each, and of tokens: means of 24 replies to prompts that were never seen before,
        # of two models that answer (docs/log, 2026-11-28); so for the other tables.
        prior=Prior(0.3, 0.4, tables=True),
        nbytes=lambda bundle, context: SuffixIndex.planned_bytes(context),
        sequence_bytes=SuffixIndex.planned_bytes,
        order=10,
    ),
)
