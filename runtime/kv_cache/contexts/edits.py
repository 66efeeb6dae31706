"""What an edit leaves of a text: runs of tokens whose rows stay, with their keys turned to where they are now.

PIE (He et al. 2024): an edit inside a text evaluates what is new alone. Rows behind it keep what they know of the text
before the edit, so they are not those that evaluating the text again would give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from edgeinfer.records import dataclass

# Runs that stay inside an edit have this many tokens at least: fewer are sooner evaluated than turned.
_LEAST = 16


@dataclass(frozen=True)
class EditPart:
    """A run of tokens of the edited text.

    Attributes:
        start, stop: where it is now.
        before: where it was; None where it is new.
    """

    start: int
    stop: int
    before: int | None


def parts_of_edit(old: Sequence[int], new: Sequence[int]) -> Iterator[EditPart]:
    """The edited text in order, in parts that were there before and parts that were not."""
    start = _common(old, new)
    same = _common(old[start:][::-1], new[start:][::-1])
    if start:
        yield EditPart(0, start, 0)
    # What lies between the first and the last difference is compared alone: comparing takes more than its length.
    last = len(new) - same
    matcher = SequenceMatcher(None, old[start : len(old) - same], new[start:last], autojunk=False)
    done = start
    for run in matcher.get_matching_blocks():
        if run.size < _LEAST:
            continue
        if done < start + run.b:
            yield EditPart(done, start + run.b, None)
        done = start + run.b + run.size
        yield EditPart(start + run.b, done, start + run.a)
    if done < last:
        yield EditPart(done, last, None)
    if same:
        yield EditPart(last, len(new), len(old) - same)


def _common(old: Sequence[int], new: Sequence[int]) -> int:
    """How many tokens both begin with."""
    size = min(len(old), len(new))
    return next((place for place in range(size) if old[place] != new[place]), size)
