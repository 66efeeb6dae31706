"""Stories of a text file, as a model reads them; knows nothing of what is measured with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import edgeinfer
from edgeinfer.errors import UsageError

__all__ = ["SEPARATOR", "all_stories", "calibration_text", "read_stories", "story_ids"]

SEPARATOR = "<|endoftext|>"


def all_stories(path: Path) -> list[str]:
    """Every story of a text file.

    Raises:
        UsageError: it cannot be read, or has none.
    """
    hint = f"Give UTF-8 text with stories separated by {SEPARATOR}."
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.", hint) from error
    stories = [story.strip() for story in text.split(SEPARATOR) if story.strip()]
    if not stories:
        raise UsageError(f"{path} has no stories.", hint)
    return stories


def read_stories(path: Path, count: int, skip: int = 0) -> list[str]:
    """The last `count` stories of a text file, without the `skip` that come after them.

    Raises:
        UsageError: the file has none.
    """
    stories = all_stories(path)
    chosen = stories[: len(stories) - skip][-count:]
    if not chosen:
        raise UsageError(f"{path} has no stories but those that are skipped.", "Skip fewer.")
    return chosen


def story_ids(model: edgeinfer.Model, story: str) -> list[int]:
    """A story after the begin token, which most tokenizers put there themselves, cut at the model's context."""
    begin, ids = model.begin_ids, model.tokenize(story, parse_special=False)
    return (ids if ids[: len(begin)] == begin else begin + ids)[: model.context]


def calibration_text(stories: Iterable[str]) -> str:
    """Stories as the export command takes texts: its paragraphs are texts of their own, so a story must be one."""
    paragraphs = ("\n".join(line for line in story.splitlines() if line.strip()) for story in stories)
    return "\n\n".join(paragraphs) + "\n"
