"""Finds stop strings in text that comes in pieces, but not in the notation of calls, which no client sees."""

from __future__ import annotations

from array import array

from edgeinfer.records import dataclass


class StopMatcher:
    """Knuth, Morris and Pratt's search for each of the stop strings, fed with text in pieces of any size.

    The match that ends first wins, and of several that end together the longest, so the outcome never depends on
    how the text was cut into pieces. Takes time that grows with the text times the number of stop strings, and four
    bytes of memory for each of their characters.

    Args:
        stops: non-empty strings; with none, all text passes at once.

    Attributes:
        found: the one that was found; None while none was.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        # The longest first, so that of several that end together it is the first found.
        self._searches = [_Search(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._withheld = ""
        self.found: str | None = None

    @property
    def matched(self) -> bool:
        """Whether a stop string was found; all later text is swallowed."""
        return self.found is not None

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string has been found (then: only what precedes it)."""
        if self.matched:
            return "", True
        # The end of the first match, and where the longest that ends there begins.
        found = min(
            ((end, -len(search.stop)) for search in self._searches if (end := search.push(text)) is not None),
            default=None,
        )
        whole = self._withheld + text
        if found is not None:
            end = len(self._withheld) + found[0]
            shown, self.found = whole[: end + found[1]], whole[end + found[1] : end]
            self._withheld = ""
            return shown, True
        safe = len(whole) - max((search.length for search in self._searches), default=0)
        self._withheld = whole[safe:]
        return whole[:safe], False

    def flush(self) -> str:
        """The withheld text, at the end of the stream; empty after a match."""
        withheld, self._withheld = self._withheld, ""
        for search in self._searches:
            search.length = 0
        return withheld


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


@dataclass(frozen=True)
class CallMark:
    """What the calls of a reply begin with.

    Attributes:
        text: of the mark.
        token: that it is, where it is a special one, which has no text; else None.
        anywhere: whether text may stand before it; else it counts at the very beginning only.
    """

    text: str
    token: int | None
    anywhere: bool


class CallStops:
    """Looks for stop strings in the text before calls alone; white space before their mark belongs to them.

    Args:
        matcher: looks for them.
        mark: of the calls.
    """

    def __init__(self, matcher: StopMatcher, mark: CallMark) -> None:
        self._matcher, self._mark = matcher, mark
        self._pending = ""  # what may belong to calls
        self._started = self._calls = False  # whether there was text before calls; whether calls have started

    @property
    def found(self) -> str | None:
        """As of `StopMatcher`."""
        return self._matcher.found

    def push(self, text: str) -> tuple[str, bool]:
        """As of `StopMatcher`."""
        if self._calls:
            return text, False
        self._pending += text
        place = -1 if self._mark.token is not None else self._pending.find(self._mark.text)
        if place >= 0 and (self._mark.anywhere or (place == 0 and not self._started)):
            return self.begin(place)
        pending = self._pending
        kept = next(
            (size for size in range(len(self._mark.text), 0, -1) if pending.endswith(self._mark.text[:size])), 0
        )
        content = pending[: len(pending) - kept].rstrip() if self._mark.token is None else pending.rstrip()
        if not self._mark.anywhere:
            content = "" if not self._started and self._mark.text.startswith(pending) else pending
        self._pending, self._started = pending[len(content) :], self._started or bool(content)
        return self._matcher.push(content)

    def begin(self, place: int | None = None) -> tuple[str, bool]:
        """The same where calls begin, at this place of the pending text, or behind it."""
        pending, self._pending = self._pending, ""
        content = pending[:place].rstrip()
        shown, matched = self._matcher.push(content)
        if matched:
            return shown, True
        self._calls = True
        return shown + self._matcher.flush() + pending[len(content) :], False

    def flush(self) -> str:
        """As of `StopMatcher`."""
        pending, self._pending = self._pending, ""
        shown, matched = (pending, False) if self._calls else self._matcher.push(pending)
        return shown if matched else shown + self._matcher.flush()
