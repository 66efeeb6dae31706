"""Prompts of a benchmark by category, from data sets or built in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgeinfer.apps.bench.texts import BUILTIN_DIALOGUES, EXACT_DIALOGUES
from edgeinfer.errors import PromptError, TemplateError

# Categories that the built-in story model was trained for, and those of them whose replies repeat the conversation.
STORIES = ("tales/write", "tales/retell", "tales/again")
RETELLING = ("tales/retell", "tales/again")
# Kinds of dialogues about stories whose answers the data set gives.
_EXACT = ("retell", "again", "who", "start")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A conversation whose next turn is the model's.

    Attributes:
        category: "source" or "source/kind".
        name: unlike any other's, and the same each time.
        answer: the only right reply; None where there is no such thing.
    """

    category: str
    name: str
    messages: tuple[Message, ...]
    answer: str | None = None


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as a model takes it.

    Attributes:
        ids: its tokens, the first `cut` left out.
        cut: tokens that the context had no room for.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    cut: int


class Tokenizes(Protocol):
    """The part of a model that turns prompts into tokens."""

    @property
    def context(self) -> int:
        """Tokens of prompt plus reply."""

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of a text."""

    def tokenize_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation; TemplateError where the model has no chat template."""


def load_prompts(folder: Path, per_category: int, categories: Sequence[str] | None = None) -> list[Prompt]:
    """Prompts of every data set in a folder, by category.

    Args:
        folder: with tales_dialogues/, mtbench/, specbench/, gsm8k/ and summarization/, or some of them.
        per_category: at most, drawn at random where there are more, always the same ones.
        categories: take only these, or those of these sources; None is all.
    """
    found: dict[str, list[Prompt]] = {}
    for name, read in _SOURCES.items():
        path = folder / name
        if path.is_file():
            for prompt in _read(path, read):
                found.setdefault(prompt.category, []).append(prompt)
    if not found:
        raise PromptError(f"{folder} holds no prompts.", f"It should have some of {', '.join(_SOURCES)}.")
    chosen = _chosen(found, categories)
    return [prompt for name in chosen for prompt in _draw(found[name], per_category)]


def builtin_prompts(per_category: int, categories: Sequence[str] | None = None) -> list[Prompt]:
    """A dozen dialogues in the style of the built-in story model."""
    found: dict[str, list[Prompt]] = {}
    for number, (kind, messages) in enumerate(BUILTIN_DIALOGUES):
        category = f"tales/{kind}"
        found.setdefault(category, []).append(Prompt(category, f"{category}#{number}", messages))
    return [prompt for name in _chosen(found, categories) for prompt in found[name][:per_category]]


def exact_prompts(folder: Path | None, per_category: int) -> list[Prompt]:
    """Prompts that have one right reply, by category: of a folder of data sets, or built in where it is None."""
    if folder is not None:
        found = load_prompts(folder, per_category, categories=[f"tales/{kind}" for kind in _EXACT])
        return [prompt for prompt in found if prompt.answer is not None]
    by_kind: dict[str, list[Prompt]] = {}
    for number, (kind, messages, answer) in enumerate(EXACT_DIALOGUES):
        category = f"tales/{kind}"
        by_kind.setdefault(category, []).append(Prompt(category, f"{category}#{number}", messages, answer))
    return [prompt for prompts in by_kind.values() for prompt in prompts[:per_category]]


def tokenize_prompts(model: Tokenizes, prompts: Sequence[Prompt], max_tokens: int) -> list[TokenizedPrompt]:
    """The prompts' tokens, cut at the front where they would leave no room for a reply of `max_tokens`.

    Models without a chat template are given the messages' texts, one after the other.
    """
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


def _chosen(found: Mapping[str, list[Prompt]], categories: Sequence[str] | None) -> list[str]:
    """Names of categories in order of appearance."""
    if categories is None:
        return list(found)
    for wanted in categories:
        if not any(wanted in (name, name.partition("/")[0]) for name in found):
            raise PromptError(f"There is no category {wanted!r}.", f"Categories: {', '.join(found)}.")
    return [name for name in found if name in categories or name.partition("/")[0] in categories]


def _draw(prompts: list[Prompt], count: int) -> list[Prompt]:
    """So many of them in their own order; those of a smaller count are among those of a larger one."""
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


def _question(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _tales(row: dict[str, Any], number: int) -> Prompt:
    category = f"tales/{row['kind']}"
    return Prompt(category, f"{category}#{number}", tuple(row["messages"]), row.get("answer"))


def _mtbench(row: dict[str, Any], number: int) -> Prompt:
    return Prompt("mtbench", f"mtbench#{row['question_id']}", _question(row["turns"][0]))


def _specbench(row: dict[str, Any], number: int) -> Prompt:
    return Prompt(f"specbench/{row['category']}", f"specbench#{row['question_id']}", _question(row["turns"][0]))


def _gsm8k(row: dict[str, Any], number: int) -> Prompt:
    return Prompt("gsm8k", f"gsm8k#{number}", _question(row["question"]))


def _summary(kind: str) -> Callable[[dict[str, Any], int], Prompt]:
    category = f"summarization/{kind}"
    return lambda row, number: Prompt(category, f"{category}#{number}", _question(row["prompt"]))


# Files and how a line of theirs becomes a prompt. Of questions in turns the first is asked: the others are about
# replies that no model has given.
_SOURCES: dict[str, Callable[[dict[str, Any], int], Prompt]] = {
    "tales_dialogues/dialogues.jsonl": _tales,
    "mtbench/question.jsonl": _mtbench,
    "specbench/question.jsonl": _specbench,
    "gsm8k/train.jsonl": _gsm8k,
    "summarization/cnn_dailymail.jsonl": _summary("cnn"),
    "summarization/samsum.jsonl": _summary("samsum"),
}
