"""Texts for models to read and prompts for them to answer: built in, or from files of stories and data sets."""

from __future__ import annotations

import importlib.resources
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.core.errors import PromptError, TemplateError, UsageError

SEPARATOR = "<|endoftext|>"
Message = Mapping[str, Any]
Dialogue = tuple[Message, ...]
# Where a folder of data sets has stories to read.
STORIES_FILE = "tinystories/tinystories_train_part0.txt"


def all_stories(path: Path) -> list[str]:
    """Every story of a text file."""
    hint = f"Give UTF-8 text with stories separated by {SEPARATOR}."
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.", hint) from error
    stories = [story.strip() for story in text.split(SEPARATOR) if story.strip()]
    if not stories:
        raise UsageError(f"{path} has no stories.", hint)
    return stories


def story_ids(model: edgeinfer.Model, story: str) -> list[int]:
    """A story after the begin token, cut at the model's context."""
    begin, ids = model.begin_ids, model.tokenize(story, parse_special=False)
    return (ids if ids[: len(begin)] == begin else begin + ids)[: model.context]


@dataclass(frozen=True)
class Story:
    """A story with its hero's name, another name that is not in it, and whether it names no other person."""

    hero: str
    other: str
    text: str
    alone: bool = True

    @property
    def start(self) -> str:
        """Its first sentence."""
        return self.text.partition(".")[0] + "."


_FILE = importlib.resources.files("edgeinfer.apps.bench").joinpath("stories.json")
BUILTIN_STORIES = tuple(Story(**story) for story in json.loads(_FILE.read_text("utf-8")))
_KITE, _TURTLE, _SOUP = BUILTIN_STORIES[:3]


def _asked(request: str) -> Dialogue:
    return ({"role": "user", "content": request},)


def _after(story: Story, request: str) -> Dialogue:
    """A request that follows a story in the conversation."""
    answer = {"role": "assistant", "content": story.text}
    return (*_asked(f"Tell me a story about {story.hero}."), answer, *_asked(request))


def _renamed(story: Story) -> Dialogue:
    return _after(story, f"Tell it again, but call {story.hero} {story.other}.")


BUILTIN_DIALOGUES: tuple[tuple[str, Dialogue], ...] = (
    ("write", _asked("Write a story with the words boat, brave and sleep.")),
    ("write", _asked("Write a story with the words cake, share and happy.")),
    ("write", _asked("Write a story with the words snow, lost and friend.")),
    ("write", _asked("Tell me a story about Mia.")),
    ("retell", _renamed(_KITE)),
    ("retell", _renamed(_TURTLE)),
    ("retell", _renamed(_SOUP)),
    ("again", _after(_KITE, "Tell it again.")),
    ("again", _after(_TURTLE, "Tell it again.")),
    ("who", _after(_KITE, "Who is in the story?")),
    ("who", _after(_SOUP, "Who is in the story?")),
    ("start", _after(_TURTLE, "How does the story start?")),
)


def _exact(story: Story) -> Iterator[tuple[str, Dialogue, str]]:
    yield "retell", _renamed(story), story.text.replace(story.hero, story.other)
    yield "again", _after(story, "Tell it again."), story.text
    yield "start", _after(story, "How does the story start?"), story.start
    if story.alone:
        yield "who", _after(story, "Who is in the story?"), f"{story.hero}."


# Kind, dialogue, and the only right answer.
EXACT_DIALOGUES = tuple(dialogue for story in BUILTIN_STORIES for dialogue in _exact(story))


# Categories that the built-in story model was trained for.
STORIES = ("tales/write", "tales/retell", "tales/again")
# Kinds of dialogues that have one right answer.
_EXACT = ("retell", "again", "who", "start")


@dataclass(frozen=True)
class Prompt:
    """A conversation whose next turn is the model's."""

    category: str  # "source" or "source/kind"
    name: str  # unique and stable
    messages: tuple[Message, ...]
    answer: str | None = None  # the only right reply, if there is one


@dataclass(frozen=True)
class Material:
    """Stories to read, others to calibrate with, questions with answers, and the name of the stories."""

    stories: tuple[str, ...]
    calibration: tuple[str, ...] = ()
    questions: tuple[Prompt, ...] = ()
    name: str = ""
    pieces: int = 0  # the number of places to read of one long text; 0 reads stories from their beginning


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt's token ids; the first `cut` tokens were left out to fit the context."""

    prompt: Prompt
    ids: tuple[int, ...]
    cut: int


def load_prompts(folder: Path, per_category: int, categories: Sequence[str] | None = None) -> list[Prompt]:
    """Prompts of every data set in a folder, in the order of categories: at most `per_category`, always the same ones,
    of the categories or sources named, or of all."""
    paths = {folder / name: read for name, read in _SOURCES.items() if (folder / name).is_file()}
    found = _by_category(prompt for path, read in paths.items() for prompt in _read(path, read))
    if not found:
        raise PromptError(f"{folder} holds no prompts.", f"It should have some of {', '.join(_SOURCES)}.")
    chosen = _chosen(found, categories)
    return [prompt for name in chosen for prompt in _draw(found[name], per_category)]


def builtin_prompts(per_category: int, categories: Sequence[str] | None = None) -> list[Prompt]:
    """A dozen dialogues in the style of the built-in story model."""
    found = _by_category(
        Prompt(f"tales/{kind}", f"tales/{kind}#{number}", messages)
        for number, (kind, messages) in enumerate(BUILTIN_DIALOGUES)
    )
    return [prompt for name in _chosen(found, categories) for prompt in found[name][:per_category]]


def exact_prompts(folder: Path | None, per_category: int) -> list[Prompt]:
    """Prompts with one right reply: from a folder of data sets, or the built-in ones."""
    if folder is not None:
        found = load_prompts(folder, per_category, categories=[f"tales/{kind}" for kind in _EXACT])
        return [prompt for prompt in found if prompt.answer is not None]
    by_kind = _by_category(
        Prompt(f"tales/{kind}", f"tales/{kind}#{number}", messages, answer)
        for number, (kind, messages, answer) in enumerate(EXACT_DIALOGUES)
    )
    return [prompt for prompts in by_kind.values() for prompt in prompts[:per_category]]


def tokenize_prompts(model: edgeinfer.Model, prompts: Sequence[Prompt], max_tokens: int) -> list[TokenizedPrompt]:
    """Tokenize prompts, cut at the front where they leave no room for a reply of `max_tokens`. Models without a chat
    template get the messages' texts, joined by newlines."""
    room = model.context - max_tokens
    if room < 1:
        raise PromptError(f"Replies of {max_tokens} tokens fill the context of {model.context}.", "Ask for fewer (-n).")
    tokenized = []
    for prompt in prompts:
        try:
            ids = model.tokenize_chat(prompt.messages)
        except TemplateError:
            text = "\n".join(message["content"] for message in prompt.messages) + "\n"
            ids = model.tokenize(text, parse_special=False)
        cut = max(len(ids) - room, 0)
        tokenized.append(TokenizedPrompt(prompt, tuple(ids[cut:]), cut))
    return tokenized


def _by_category(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category, []).append(prompt)
    return found


def _chosen(found: Mapping[str, list[Prompt]], categories: Sequence[str] | None) -> list[str]:
    """Names of categories in order of appearance."""
    if categories is None:
        return list(found)
    for wanted in categories:
        if not any(wanted in (name, name.partition("/")[0]) for name in found):
            raise PromptError(f"There is no category {wanted!r}.", f"Categories: {', '.join(found)}.")
    return [name for name in found if name in categories or name.partition("/")[0] in categories]


def _draw(prompts: list[Prompt], count: int) -> list[Prompt]:
    """A random subset in the original order; smaller subsets are parts of larger ones."""
    if len(prompts) <= count:
        return prompts
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    return [prompts[index] for index in sorted(order[:count])]


def _read(path: Path, read: Callable[[dict[str, Any], int], Prompt]) -> Iterator[Prompt]:
    try:
        lines = path.read_text("utf-8").split("\n")  # splitlines would split within strings, too
        for number, line in enumerate(lines):
            if line.strip():
                yield read(json.loads(line), number)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise PromptError(f"Cannot read {path}: {error!r}.", "Give the data sets as they are published.") from error


def _tales(row: dict[str, Any], number: int) -> Prompt:
    category = f"tales/{row['kind']}"
    return Prompt(category, f"{category}#{number}", tuple(row["messages"]), row.get("answer"))


def _mtbench(row: dict[str, Any], number: int) -> Prompt:
    return Prompt("mtbench", f"mtbench#{row['question_id']}", _asked(row["turns"][0]))


def _specbench(row: dict[str, Any], number: int) -> Prompt:
    return Prompt(f"specbench/{row['category']}", f"specbench#{row['question_id']}", _asked(row["turns"][0]))


def _numbered(category: str, field: str) -> Callable[[dict[str, Any], int], Prompt]:
    return lambda row, number: Prompt(category, f"{category}#{number}", _asked(row[field]))


# Files and the reader of their lines. Of questions in turns the first is asked: the others are about replies that no
# model has given.
_SOURCES: dict[str, Callable[[dict[str, Any], int], Prompt]] = {
    "tales_dialogues/dialogues.jsonl": _tales,
    "mtbench/question.jsonl": _mtbench,
    "specbench/question.jsonl": _specbench,
    "gsm8k/train.jsonl": _numbered("gsm8k", "question"),
    "summarization/cnn_dailymail.jsonl": _numbered("summarization/cnn", "prompt"),
    "summarization/samsum.jsonl": _numbered("summarization/samsum", "prompt"),
}
