"""A growing text and where its latest n-grams of a few lengths occurred before.

Everything is undone token by token: the index of a shortened text is the one that it would have had.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

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
        """Makes this the text; what it shares with the last one from the start on is not touched.

        Returns:
            tokens that were shared.
        """
        tokens, mine = list(tokens), self.tokens
        shared = min(len(tokens), len(mine))
        if tokens[:shared] != mine[:shared]:
            shared = next(i for i in range(shared) if tokens[i] != mine[i])
        self.truncate(shared)
        for token in tokens[shared:]:
            self.append(token)
        return shared

    def append(self, token: int) -> None:
        """One more token."""
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
        """Drops all tokens from `length` on."""
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
        """The longest earlier occurrence, two tokens at least, of what text and drafted tokens end with.

        Returns:
            where it went on, of equally long ones the latest, and its length; (NONE, 0) where there is none.
        """
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

        Reads the whole text where there is none.
        """
        behind = reversed(self.tokens)
        last = next(behind, NONE)
        distance = next((n for n, token in enumerate(behind) if token == last), NONE)
        return (NONE, 0) if distance == NONE else (len(self.tokens) - 1 - distance, 1)

    def only_successor(self, token: int, *, twice: bool = False) -> int:
        """What has followed this token each time, and at least two times if asked so; NONE where that varies."""
        known = self._after.get(token, _SEVERAL)
        return NONE if known == _SEVERAL or (twice and not known & 1) else known >> 1

    def nbytes(self) -> int:
        """Bytes that it holds."""
        arrays = (self.tokens, self._latest, self._after, self._after_before, *self._before.values())
        numbers = len(self.tokens) + len(self._latest) + len(self._after)
        return sum(map(sys.getsizeof, arrays)) + _NUMBER_BYTES * numbers

    @staticmethod
    def planned_bytes(context: int) -> int:
        """What a text of so many tokens takes at most."""
        return _TOKEN_BYTES * (context + 16)

    def _extended(self, position: int, drafted: Sequence[int]) -> tuple[int, int]:
        """Of the latest occurrences of the longest n-gram, the one before which most tokens agree."""
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
