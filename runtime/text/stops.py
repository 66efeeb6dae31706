"""Finds stop strings in streamed text and holds back what may begin one; knows nothing of tokens."""

from __future__ import annotations

from array import array

__all__ = ["StopMatcher"]


class StopMatcher:
    """Knuth, Morris and Pratt's search for each of the stop strings, fed with text in pieces of any size.

    The match that ends first wins, and of several that end together the longest, so the outcome never depends on
    how the text was cut into pieces. Takes time that grows with the text times the number of stop strings, and four
    bytes of memory for each of their characters.

    Args:
        stops: non-empty strings; with none, all text passes at once.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        # The longest first, so that of several that end together it is the first found.
        self._searches = [_Search(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
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
        # The end of the first match, and where the longest that ends there begins.
        found = min(
            ((end, -len(search.stop)) for search in self._searches if (end := search.push(text)) is not None),
            default=None,
        )
        whole = self._held + text
        if found is not None:
            shown = whole[: len(self._held) + found[0] + found[1]]
            self._held, self._matched = "", True
            return shown, True
        safe = len(whole) - max((search.length for search in self._searches), default=0)
        self._held = whole[safe:]
        return whole[:safe], False

    def flush(self) -> str:
        """The text held back, at the end of the stream; empty after a match."""
        held, self._held = self._held, ""
        for search in self._searches:
            search.length = 0
        return held


class _Search:
    """Finds one string.

    Attributes:
        length: of the longest beginning of the string that the text so far ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._shorter = _borders(stop)

    def push(self, text: str) -> int | None:
        """Where in the text the string first ends, None where it does not."""
        stop, shorter, length = self.stop, self._shorter, self.length
        for index, character in enumerate(text):
            while length and stop[length] != character:
                length = shorter[length]
            length += stop[length] == character
            if length == len(stop):
                return index + 1
        self.length = length
        return None


def _borders(stop: str) -> array[int]:
    """For each length of a beginning of the string, the length of the longest shorter one that it ends with."""
    borders = array("I", [0, 0])
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders
