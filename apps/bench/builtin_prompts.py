"""Dialogues written for the built-in story model, some with the only right answer; knows no data sets or models."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.apps.bench.builtin_texts import KITE, SOUP, STORIES, TURTLE, Story

__all__ = ["BUILTIN_DIALOGUES", "EXACT_DIALOGUES", "Dialogue"]

Dialogue = tuple[dict[str, str], ...]


def _asked(request: str) -> Dialogue:
    return ({"role": "user", "content": request},)


def _after(story: Story, request: str) -> Dialogue:
    """A request about a story that the model has told."""
    told = (
        {"role": "user", "content": f"Tell me a story about {story.hero}."},
        {"role": "assistant", "content": story.text},
    )
    return (*told, *_asked(request))


def _renamed(story: Story) -> Dialogue:
    return _after(story, f"Tell it again, but call {story.hero} {story.other}.")


BUILTIN_DIALOGUES: tuple[tuple[str, Dialogue], ...] = (
    ("write", _asked("Write a story with the words boat, brave and sleep.")),
    ("write", _asked("Write a story with the words cake, share and happy.")),
    ("write", _asked("Write a story with the words snow, lost and friend.")),
    ("write", _asked("Tell me a story about Mia.")),
    ("retell", _renamed(KITE)),
    ("retell", _renamed(TURTLE)),
    ("retell", _renamed(SOUP)),
    ("again", _after(KITE, "Tell it again.")),
    ("again", _after(TURTLE, "Tell it again.")),
    ("who", _after(KITE, "Who is in the story?")),
    ("who", _after(SOUP, "Who is in the story?")),
    ("start", _after(TURTLE, "How does the story start?")),
)


def _exact(story: Story) -> Iterator[tuple[str, Dialogue, str]]:
    yield "retell", _renamed(story), story.text.replace(story.hero, story.other)
    yield "again", _after(story, "Tell it again."), story.text
    yield "start", _after(story, "How does the story start?"), story.start
    if story.alone:
        yield "who", _after(story, "Who is in the story?"), f"{story.hero}."


# By kind, with the answer that the request leaves no choice about.
EXACT_DIALOGUES = tuple(dialogue for story in STORIES for dialogue in _exact(story))
