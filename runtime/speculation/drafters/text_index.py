"""Finds earlier places of a text that are like its end, also through substitutions."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

NONE = -1
# Longer n-grams than four found nothing more in simulation; beyond them the text itself is compared.
_LENGTHS = (2, 3, 4)
_LONGEST = _LENGTHS[-1]
# Earlier occurrences of the longest n-gram that are compared, and tokens compared: they bound the time of a look-up.
_OCCURRENCES = 8
_COMPARED = 32
_SPREAD = 0x9E3779B97F4A7C15
_WORD = (1 << 61) - 1
_NUMBER_BYTES = sys.getsizeof(1 << 60)
# A token's place in the three dictionaries, lists and arrays, at the worst load of a dictionary.
_TOKEN_BYTES = 400
_SEVERAL = -1


class SuffixIndex:
    """Tokens of a conversation, found again by what stands before them. Constant time for each token and look-up."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # n-gram -> the position after its latest occurrence. It is entered when that position is filled, so that what
        # is found always has a successor.
        self._latest: dict[int, int] = {}
        # For each length and position: where the n-gram before the position had gone on the time before.
        self._before = {length: array("i") for length in _LENGTHS}
        # token -> its one successor, and whether it was seen twice: 2 * successor + twice; -1 has had several.
        self._after: dict[int, int] = {}
        self._after_before: list[int | None] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def replace(self, tokens: Sequence[int]) -> int:
        """Make this the text; the tokens it shares with the last one from the start on are not touched, and counted."""
        tokens, mine = list(tokens), self.tokens
        shared = min(len(tokens), len(mine))
        if tokens[:shared] != mine[:shared]:
            shared = next(i for i in range(shared) if tokens[i] != mine[i])
        self.truncate(shared)
        for token in tokens[shared:]:
            self.append(token)
        return shared

    def append(self, token: int) -> None:
        tokens, latest, end = self.tokens, self._latest, len(self.tokens)
        for length, key in zip(_LENGTHS, _keys(tokens[-_LONGEST:]), strict=False):
            self._before[length].append(latest.get(key, NONE))
            latest[key] = end
        for length in _LENGTHS[max(end - 1, 0) :]:
            self._before[length].append(NONE)
        tokens.append(token)
        if end:
            last = tokens[end - 1]
            known = self._after.get(last)
            self._after_before.append(known)
            if known is None:
                self._after[last] = 2 * token
            elif known != _SEVERAL:
                self._after[last] = 2 * token + 1 if known >> 1 == token else _SEVERAL

    def truncate(self, length: int) -> None:
        """Drop all tokens from `length` on."""
        tokens, latest = self.tokens, self._latest
        while len(tokens) > length:
            tokens.pop()
            keys = _keys(tokens[-_LONGEST:])
            for size in _LENGTHS:
                earlier = self._before[size].pop()
                if size > len(tokens):
                    continue
                key = keys[size - _LENGTHS[0]]
                if earlier == NONE:
                    del latest[key]
                else:
                    latest[key] = earlier
            if tokens:
                known = self._after_before.pop()
                if known is None:
                    del self._after[tokens[-1]]
                else:
                    self._after[tokens[-1]] = known

    def longest(self, drafted: Sequence[int] = ()) -> tuple[int, int]:
        """Where the longest earlier occurrence, two tokens at least, of what text and drafted tokens end with went on,
        of equally long ones the latest, and its length; (NONE, 0) where there is none."""
        count = len(drafted)
        tail = list(drafted[-_LONGEST:]) if count >= _LONGEST else [*self.tokens[count - _LONGEST :], *drafted]
        best, size = NONE, 0
        for length, key in zip(_LENGTHS, _keys(tail), strict=False):
            position = self._latest.get(key, NONE)
            if position == NONE:
                return best, size
            best, size = position, length
        return self._extended(best, drafted) if size == _LONGEST else (best, size)

    def latest_of_last(self) -> tuple[int, int]:
        """Where the text went on after the latest earlier occurrence of its last token, and 1; (NONE, 0) without one.
        Reads the whole text where there is none."""
        behind = reversed(self.tokens)
        last = next(behind, NONE)
        distance = next((n for n, token in enumerate(behind) if token == last), NONE)
        return (NONE, 0) if distance == NONE else (len(self.tokens) - 1 - distance, 1)

    def only_successor(self, token: int, *, twice: bool = False) -> int:
        """What has followed this token each time, and at least two times if asked so; NONE where that varies."""
        known = self._after.get(token, _SEVERAL)
        return NONE if known == _SEVERAL or (twice and not known & 1) else known >> 1

    def nbytes(self) -> int:
        arrays = (self.tokens, self._latest, self._after, self._after_before, *self._before.values())
        numbers = len(self.tokens) + len(self._latest) + len(self._after)
        return sum(map(sys.getsizeof, arrays)) + _NUMBER_BYTES * numbers

    @staticmethod
    def planned_bytes(context: int) -> int:
        """What a text of so many tokens takes at most."""
        return _TOKEN_BYTES * (context + 16)

    def _extended(self, position: int, drafted: Sequence[int]) -> tuple[int, int]:
        """Find, among the latest occurrences of the longest n-gram, the one before which most tokens agree."""
        tokens, earlier = self.tokens, self._before[_LONGEST]
        behind = [*tokens[-_COMPARED:], *drafted][: -_COMPARED - 1 : -1]
        best, size = position, 0
        for _ in range(_OCCURRENCES):
            start = position - 1
            length = _LONGEST
            most = min(len(behind), position)
            while length < most and behind[length] == tokens[start - length]:
                length += 1
            if length > size:
                best, size = position, length
            position = earlier[position]
            if position == NONE:
                break
        return best, size


def _keys(tail: Sequence[int]) -> list[int]:
    """Hashes of the last two, three, ... of these tokens. 61 bits: no two n-grams of a text are mistaken."""
    key, keys = 0, []
    for token in reversed(tail):
        key = (key * _SPREAD + token + 1) & _WORD
        keys.append(key)
    return keys[1:]


# Source tokens searched for the one that the text went on with, and tokens that the text may go its own way for. In
# simulation on retellings half of each was 2% slower; with three times as many accidental agreements cost 9%.
_WINDOW = 60
_STRAY = 24
# Longest source span and replacement that are learnt. A name is up to four tokens; with single ones alone retellings
# were 11% slower.
_SPAN = 4
# A substitution that failed so often is forgotten: a second name may have been meant the first time.
_FAILURES = 2
# Trust is in tokens of agreement: how long an n-gram found elsewhere must be for the cursor to leave for it. What a
# miss leaves of it lets two tokens elsewhere win over a long run that ended, but not over one that has gone on again.
_MOST_TRUST = 8.0
_KEPT_TRUST = 0.25
# What a token of agreement leaves of the memory of earlier misses.
_FORGIVEN = 0.9
_SUBSTITUTION_BYTES = 400


class Evidence(NamedTuple):
    """What speaks for a place."""

    run: int  # tokens that agreed since the last that did not
    trust: float  # how long a match elsewhere must be to count for more
    misses: float  # tokens that did not agree, the older the less
    proven: int  # committed tokens that the place foretold

    @classmethod
    def of_match(cls, length: int, before: Evidence | None = None) -> Evidence:
        """So many tokens agree before a place; what was missed and proven before at another."""
        misses, proven = (before.misses, before.proven) if before else (0.0, 0)
        return cls(length, min(length, _MOST_TRUST), misses, proven)

    def agreed(self, committed: bool) -> Evidence:
        """One more token agreed."""
        run, trust, misses, proven = self
        return Evidence(run + 1, min(trust + 1.0, _MOST_TRUST), misses * _FORGIVEN, proven + committed)

    def missed(self, run: int) -> Evidence:
        """A token did not agree, and at the new place so many do."""
        return Evidence(run, self.trust * _KEPT_TRUST, self.misses + 1.0, self.proven)


class Substitution:
    """A span of the source, what the text has for it, and how often that came true or not."""

    __slots__ = ("failures", "hits", "replacement", "span")

    def __init__(self, span: list[int], replacement: list[int]) -> None:
        self.span = span
        self.replacement = replacement
        self.hits = 0
        self.failures = 0


class _Gap(NamedTuple):
    """Where source and text part and where they may have met again; text positions count from its first token."""

    source_start: int
    text_start: int
    source_end: int
    text_end: int


class Cursor(NamedTuple):
    """Where in the source the text is."""

    position: int  # of the source's token that comes next
    token: int  # that the text should go on with
    evidence: Evidence  # for this place
    gap: _Gap | None = None  # what is not explained yet
    substitution: Substitution | None = None  # in force at the position
    done: int = 0  # tokens of its replacement that the text has already
    fresh: Substitution | None = None  # a substitution that only drafted tokens have shown


class Aligner:
    """Moves cursors over the text of an index. Paths are drafted tokens up to and with the one a cursor is moved over.
    A committed token is a path of its own: it is not indexed before everything has moved over it."""

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self._learnt: dict[int, Substitution] = {}

    def forget(self) -> None:
        """Drop all substitutions."""
        self._learnt.clear()

    def nbytes(self) -> int:
        """Bytes of the substitutions, about."""
        return _SUBSTITUTION_BYTES * len(self._learnt)

    def place(
        self,
        position: int,
        path: Sequence[int],
        evidence: Evidence,
        gap: _Gap | None = None,
        fresh: Substitution | None = None,
    ) -> Cursor | None:
        """A cursor at a position behind text and path; None where there is nothing to repeat yet."""
        tokens = self._index.tokens
        size = len(tokens)
        if position < size:
            token = tokens[position]
        elif position < size + len(path):
            token = path[position - size]
        else:
            return None
        rule = fresh if fresh is not None and fresh.span[0] == token else self._learnt.get(token)
        if rule is not None and tokens[position : position + len(rule.span)] == rule.span:
            return Cursor(position, rule.replacement[0], evidence, gap, rule, 0, fresh)
        return Cursor(position, token, evidence, gap, None, 0, fresh)

    def advance(self, cursor: Cursor, token: int, path: Sequence[int], *, committed: bool) -> Cursor | None:
        """The cursor after the last token of a path; nothing is learnt unless it is committed."""
        if token != cursor.token:
            return self._missed(cursor, token, path, committed)
        evidence, rule, fresh = cursor.evidence.agreed(committed), cursor.substitution, cursor.fresh
        position = cursor.position + 1
        if rule is not None:
            done = cursor.done + 1
            if done < len(rule.replacement):
                return Cursor(cursor.position, rule.replacement[done], evidence, cursor.gap, rule, done, fresh)
            position = cursor.position + len(rule.span)
            rule.hits += committed
        if cursor.gap is not None:
            fresh = self._explained(cursor.gap, path, committed) or fresh
        return self.place(position, path, evidence, None, fresh)

    def _missed(self, cursor: Cursor, token: int, path: Sequence[int], committed: bool) -> Cursor | None:
        """The most likely place after a token that the source does not have at the cursor."""
        tokens = self._index.tokens
        now = len(tokens) + len(path) - 1  # the token's position in the text
        gap = cursor.gap
        start, text_start = (gap.source_start, gap.text_start) if gap else (cursor.position, now - cursor.done)
        strayed = now - text_start + 1
        if committed and cursor.substitution is not None:
            self._failed(cursor.substitution)
        if strayed > _STRAY:
            return None
        try:
            found = tokens.index(token, start, start + _WINDOW)
        except ValueError:
            position = self._unit_end(start) if strayed == 1 else start + strayed
            apart = _Gap(start, text_start, position, now + 1)
            return self.place(position, path, cursor.evidence.missed(0), apart, cursor.fresh)
        # The source's own token at once: a substitution that was not made this time.
        apart_here = None if found == start and strayed == 1 else _Gap(start, text_start, found, now)
        return self.place(found + 1, path, cursor.evidence.missed(1), apart_here, cursor.fresh)

    def _unit_end(self, start: int) -> int:
        """Where a word that begins here ends: tokens that always follow one another are replaced together."""
        tokens, end = self._index.tokens, start + 1
        while end - start < _SPAN and end < len(tokens):
            if self._index.only_successor(tokens[end - 1], twice=True) != tokens[end]:
                break
            end += 1
        return end

    def _explained(self, gap: _Gap, path: Sequence[int], committed: bool) -> Substitution | None:
        """Take a closed gap for a substitution, if it is one; returned where it is only drafted."""
        tokens = self._index.tokens
        span, size = tokens[gap.source_start : gap.source_end], gap.text_end - gap.text_start
        if not 0 < len(span) <= _SPAN or not 0 < size <= _SPAN:
            return None
        drafted = path[max(0, gap.text_start - len(tokens)) :]
        replacement = [*tokens[gap.text_start : gap.text_end], *drafted][:size]
        if span == replacement:
            return None
        if not committed:
            return Substitution(span, replacement)
        self._learn(span, replacement)
        return None

    def _learn(self, span: list[int], replacement: list[int]) -> None:
        known = self._learnt.get(span[0])
        if known is not None and known.span == span and known.replacement == replacement:
            known.hits += 1
            return
        self._learnt[span[0]] = Substitution(span, replacement)

    def _failed(self, rule: Substitution) -> None:
        rule.failures += 1
        if rule.failures >= _FAILURES and self._learnt.get(rule.span[0]) is rule:
            del self._learnt[rule.span[0]]
