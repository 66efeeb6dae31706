"""Keeps a text that retells another in step with it, across replaced, inserted and left out words.

A cursor stands at the token of the source that the text should repeat next. Where the text does something else, the
cursor stays near (input-guided aggressive decoding, algorithms.md C4) instead of being lost until an n-gram is found
again, and what stood for what is remembered as a substitution: a retelling with another name is copied with that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgeinfer.runtime.speculation.drafters.suffixes import SuffixIndex

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
    """What speaks for a place.

    Attributes:
        run: tokens that agreed since the last that did not.
        trust: how long a match elsewhere must be to count for more.
        misses: tokens that did not agree, the older the less.
        proven: committed tokens that the place foretold.
    """

    run: int
    trust: float
    misses: float
    proven: int

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
    """Where in the source the text is.

    Attributes:
        position: of the source's token that comes next.
        token: that the text should go on with.
        evidence: for this place.
        gap: what is not explained yet.
        substitution: in force at the position.
        done: tokens of its replacement that the text has already.
        fresh: a substitution that only drafted tokens have shown.
    """

    position: int
    token: int
    evidence: Evidence
    gap: _Gap | None = None
    substitution: Substitution | None = None
    done: int = 0
    fresh: Substitution | None = None


class Aligner:
    """Moves cursors over the text of an index.

    Paths are drafted tokens up to and with the one a cursor is moved over. A committed token is a path of its own: it
    is not indexed before everything has moved over it.

    Args:
        index: the text.
    """

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self._learnt: dict[int, Substitution] = {}

    def forget(self) -> None:
        """Drops all substitutions."""
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
        """Takes a closed gap for a substitution, if it is one; returned where it is only drafted."""
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
