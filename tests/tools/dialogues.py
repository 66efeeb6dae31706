"""Short dialogues made of stories: write one, continue one, tell it again, who is in it.

python -m tests.tools.dialogues STORIES OUT.jsonl [--exclude FILE] [--seed 1]

The built-in model and its drafter were trained on dialogues of this kind. A line of the file is an object
with "messages".
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.bundle.writing import write_file
from edgeinfer.core.errors import UsageError
from edgeinfer.export.training.text import SEPARATOR

Message = dict[str, str]
# Least number of stories.
_FEWEST = 50

_ASCII = str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "—": " - ", "–": "-", "…": "..."})  # fmt: skip
_SHORTEST, _LONGEST = 250, 1500
_COMMON_WORDS = (
    "the a an and or but if so then he she they them him her his their it its was were is are be been had has have "
    "did do does to of in on at for with from by as that this there one day very not no you i we me my your our up "
    "out down into over all said saw went want wanted like liked could would will can who what when where how too "
    "again also just only some more about after before because than get got made make other let put came come back "
    "new time once upon little big long lot named name always never every "
)
_COMMON = frozenset(_COMMON_WORDS.split())
_NOT_NAMES = frozenset({"The", "She", "They", "Mom", "Dad", "One", "But", "And", "When", "Then", "You", "Mommy"})
_NOT_NAMES |= {"Daddy", "His", "Her", "Once", "What"}
_NAME_WORDS = (
    "Lily Tom Mia Ben Sara Max Anna Sam Lucy Jack Emma Leo Zoe Tim Amy Bob Ella Finn Kate Dan Nora Ray Ivy Joe Sue "
    "Jill Spot Rosie Milo Ruby "
)
_NAMES = tuple(_NAME_WORDS.split())
_SENTENCE = re.compile(r"(?<=[.!?]) ")


def read_stories(folder: Path, excluded: Path | None = None) -> list[str]:
    """The stories of every .txt file (separated by SEPARATOR) and .jsonl file (field "text") of a folder, each once."""
    try:
        beginnings = tuple(json.loads(excluded.read_text("utf-8"))) if excluded is not None else ()
        found = dict.fromkeys(story for file in sorted(folder.iterdir()) for story in _stories(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"Cannot read stories: {error}.", "Give a folder of .txt or .jsonl files.") from error
    stories = [story for story in found if not story.startswith(beginnings)]
    if len(stories) < _FEWEST:
        raise UsageError(f"{folder} has {len(stories)} stories.", f"Give a folder with at least {_FEWEST}.")
    return stories


def _stories(file: Path) -> Iterator[str]:
    if file.suffix == ".txt":
        texts = file.read_text("utf-8").split(SEPARATOR)
    elif file.suffix == ".jsonl":
        texts = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
    else:
        return
    yield from (text.strip() for text in texts if text.strip())


def clean(story: str) -> str | None:
    """A story in plain ASCII with single spaces; None where it is too short, too long or no story."""
    text = re.sub(r"[ \t]+", " ", re.sub(r"\n+", "\n", story.translate(_ASCII))).strip()
    fits = _SHORTEST < len(text) < _LONGEST and text.isascii() and text[-1] in '."!?'
    return text if fits else None


def names_in(story: str) -> list[str]:
    """Capitalised words inside of sentences that come twice or more, the most frequent first."""
    counts = Counter(re.findall(r"(?<=[a-z,] )([A-Z][a-z]{2,8})\b", story))
    return [name for name, count in counts.most_common() if count >= 2 and name not in _NOT_NAMES]


def dialogue(story: str, rng: random.Random) -> list[Message]:
    """A request that the story answers, and often a second one about it."""
    names = names_in(story)
    kind = rng.random()
    if kind >= 0.9 and len(parts := _SENTENCE.split(story)) > 4:
        beginning = " ".join(parts[:2])
        return _turn(f"Continue this story: {beginning}", story[len(beginning) :].strip())
    if kind < 0.5 or not names:
        request = _with_words(story, rng)
    elif kind < 0.8:
        request = f"{rng.choice(('Tell me a story about', 'Write a story about'))} {names[0]}."
    else:
        request = "Tell me a story."
    return [*_turn(request, story), *(_second(story, names, rng) if names else ())]


def _turn(request: str, reply: str) -> list[Message]:
    return [{"role": "user", "content": request}, {"role": "assistant", "content": reply}]


def _with_words(story: str, rng: random.Random) -> str:
    words = list(dict.fromkeys(w for w in re.findall(r"\b[a-z]{3,9}\b", story) if w not in _COMMON))
    rng.shuffle(words)
    words = words[: rng.choice((2, 3))]
    if len(words) < 2:
        return "Tell me a story."
    begin = rng.choice(("Write a story with", "Tell me a story with", "Make up a story using"))
    return f"{begin} the words {', '.join(words[:-1])} and {words[-1]}."


def _second(story: str, names: list[str], rng: random.Random) -> list[Message]:
    kind = rng.random()
    if kind < 0.30:
        other = rng.choice([name for name in _NAMES if name not in story])
        again = re.sub(rf"\b{names[0]}\b", other, story)
        return _turn(f"Tell it again, but call {names[0]} {other}.", again)
    if kind < 0.36:
        return _turn("Tell it again.", story)
    if kind < 0.50:
        listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
        return _turn(rng.choice(("Who is in the story?", "What are the names in the story?")), f"{listed}.")
    return _turn("How does the story start?", _SENTENCE.split(story)[0]) if kind < 0.56 else []


def make_dialogues(folder: Path, excluded: Path | None, seed: int) -> Iterator[list[Message]]:
    """One dialogue of each story of a folder, in shuffled order."""
    beginnings = tuple(json.loads(excluded.read_text("utf-8"))) if excluded is not None else ()
    cleaned = dict.fromkeys(text for story in read_stories(folder, excluded) if (text := clean(story)) is not None)
    # Beginnings may be of stories as they were before they were cleaned, or after.
    stories = sorted(text for text in cleaned if not text.startswith(beginnings))
    rng = random.Random(seed)
    rng.shuffle(stories)
    return (dialogue(story, rng) for story in stories)


def main(arguments: list[str] | None = None) -> None:
    """Writes the dialogues."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", type=Path, help="folder of .txt and .jsonl files")
    parser.add_argument("out", type=Path, help="file to write, one dialogue a line")
    parser.add_argument("--exclude", type=Path, help="JSON list of beginnings of stories that are not to be seen")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    lines = [json.dumps({"messages": each}) for each in make_dialogues(args.stories, args.exclude, args.seed)]
    write_file(args.out, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
