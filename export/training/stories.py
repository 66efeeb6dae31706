"""Stories as training text: reading them, leaving some out, a tokenizer of their own; knows nothing of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgeinfer.errors import UsageError

__all__ = ["SEPARATOR", "Split", "make_tokenizer", "read_stories", "split_stories", "tokens_of"]

SEPARATOR = "<|endoftext|>"
# One story in so many is kept for measuring.
_HELD_OUT = 50

Split = tuple[list[str], list[str]]


def read_stories(folder: Path, excluded: Path | None = None) -> list[str]:
    """The stories of every .txt file (parted by SEPARATOR) and .jsonl file (field "text") of a folder, each once.

    Args:
        excluded: a JSON list of beginnings; stories that begin with one of them are left out.

    Raises:
        UsageError: there are none, or a file is not what it should be.
    """
    try:
        beginnings = tuple(json.loads(excluded.read_text("utf-8"))) if excluded is not None else ()
        found = dict.fromkeys(story for file in sorted(folder.iterdir()) for story in _stories(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"Cannot read stories: {error}.", "Give a folder of .txt or .jsonl files.") from error
    stories = [story for story in found if not story.startswith(beginnings)]
    if len(stories) < _HELD_OUT:
        raise UsageError(f"{folder} has {len(stories)} stories.", f"Give a folder with at least {_HELD_OUT}.")
    return stories


def _stories(file: Path) -> Iterator[str]:
    if file.suffix == ".txt":
        texts = file.read_text("utf-8").split(SEPARATOR)
    elif file.suffix == ".jsonl":
        texts = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
    else:
        return
    yield from (text.strip() for text in texts if text.strip())


def split_stories(stories: list[str]) -> Split:
    """Those to train on, and every fiftieth to measure with."""
    return [s for i, s in enumerate(stories) if i % _HELD_OUT], stories[::_HELD_OUT]


def make_tokenizer(stories: list[str], size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `size` tokens; `SEPARATOR` is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def tokens_of(stories: list[str], tokenizer: Tokenizer) -> NDArray[np.int64]:  # (T,)
    """All stories in one run of tokens, each behind a separator."""
    separator = tokenizer.token_to_id(SEPARATOR)
    runs = [[separator, *encoding.ids] for encoding in tokenizer.encode_batch(stories)]
    return np.concatenate([np.array(run, np.int64) for run in runs])
