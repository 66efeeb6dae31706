"""Finds stop strings in streamed text and holds back what may begin one; knows nothing of tokens."""

from __future__ import annotations

from collections import deque

__all__ = ["StopMatcher"]


class StopMatcher:
    """An Aho-Corasick automaton over the stop strings, fed with text in pieces of any size.

    The match that ends first wins, and of several that end together the longest, so the outcome never depends on
    how the text was cut into pieces. Linear in the length of the text.

    Args:
        stops: non-empty strings; with none, all text passes at once.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends in a state, 0 for none
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._matched = False

    @property
    def matched(self) -> bool:
        """Whether a stop string was found; all later text is swallowed."""
        return self._matched

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string has been found (then: only what precedes it)."""
        if self._matched:
            return "", True
        if len(self._next) == 1:
            return text, False
        state, following, fail = self._state, self._next, self._fail
        for index, character in enumerate(text):
            while state and character not in following[state]:
                state = fail[state]
            state = following[state].get(character, 0)
            if self._match[state]:
                end = len(self._held) + index + 1
                shown = (self._held + text)[: end - self._match[state]]
                self._held, self._matched = "", True
                return shown, True
        self._state = state
        whole = self._held + text
        safe = len(whole) - self._depth[state]  # the depth of a state is the length of the prefix it stands for
        self._held = whole[safe:]
        return whole[:safe], False

    def flush(self) -> str:
        """The text held back, at the end of the stream; empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][character]
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Points each state at the longest proper suffix that is also a state, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                queue.append(child)
                suffix = self._fail[state]
                while suffix and character not in self._next[suffix]:
                    suffix = self._fail[suffix]
                self._fail[child] = self._next[suffix].get(character, 0)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
