"""Text as tokens of a model, stored on disk and mapped into memory, and prompts from it. A .txt file holds documents
separated by "<|endoftext|>". A line of a .jsonl file is an object with "text", or with "messages", which the model's
chat template renders; the text before a reply is a prompt."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from edgeinfer.bundle.writing import digest_of, new_file
from edgeinfer.core.errors import StorageError, TemplateError, UsageError
from edgeinfer.export.training.models import Target

Ints = NDArray[np.int64]

SEPARATOR = "<|endoftext|>"
_AT_ONCE = 256
# Tokens of a prompt that is the beginning of a document.
_OPENING = 12
_HINT = 'Give UTF-8 .txt files, or .jsonl files whose lines have "text" or "messages".'


@dataclass(frozen=True)
class TokenFile:
    """Documents one after the other, mapped into memory."""

    ids: NDArray[np.uint32]  # (T,)
    digest: str

    def __len__(self) -> int:
        return len(self.ids)

    def require(self, count: int, what: str) -> None:
        """Refuses too little data."""
        if len(self) < count:
            raise UsageError(f"{what} has {len(self)} tokens, and {count} are needed.", "Give more text.")

    def first(self, count: int) -> TokenFile:
        """The first `count` tokens, or all."""
        return TokenFile(self.ids[:count], f"{self.digest}[:{min(count, len(self))}]")

    def split(self, share: float) -> tuple[TokenFile, TokenFile]:
        """Splits off a share of the tokens at the end."""
        at = len(self) - int(len(self) * share)
        return TokenFile(self.ids[:at], f"{self.digest}[:{at}]"), TokenFile(self.ids[at:], f"{self.digest}[{at}:]")

    def batch(self, seed: int, step: int, rows: int, length: int) -> Ints:
        """Windows at random places that depend on the seed and the step. (rows, length)"""
        starts = np.random.default_rng((seed, step)).integers(0, len(self) - length + 1, rows)
        return np.stack([self.ids[start : start + length] for start in starts]).astype(np.int64)

    def windows(self, length: int, most: int) -> Ints:
        """Windows spread evenly. (n, length)"""
        count = min(most, len(self) // length)
        starts = np.linspace(0, len(self) - length, count).astype(np.int64)
        return np.stack([self.ids[start : start + length] for start in starts]).astype(np.int64)


def write_tokens(path: Path, documents: Iterable[NDArray[np.integer]]) -> TokenFile:  # (n,) each
    """Writes documents one after the other, as they come."""
    with new_file(path) as file:
        for ids in documents:
            file.write(ids.astype("<u4").tobytes())
    return open_tokens(path)


def open_tokens(path: Path) -> TokenFile:
    """Maps a file of `write_tokens`."""
    try:
        digest = digest_of(path)
        ids = np.memmap(path, np.dtype("<u4"), "r") if path.stat().st_size else np.empty(0, np.uint32)
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read {path}: {error}.", "Remove it; it will be written again.") from error
    return TokenFile(ids, digest)


def frequent_tokens(sources: Sequence[TokenFile], count: int) -> Ints:  # (K,)
    """The most frequent tokens in ascending order; ties go to the lower ids."""
    most = max(int(tokens.ids.max()) for tokens in sources) + 1
    counts = sum(np.bincount(tokens.ids, minlength=max(most, count)) for tokens in sources)
    chosen: Ints = np.sort(np.argsort(-np.asarray(counts), kind="stable")[:count]).astype(np.int64)
    return chosen


@dataclass(frozen=True)
class TextSource:
    """Files of text in the tokens of a target."""

    files: tuple[Path, ...]
    target: Target

    def __post_init__(self) -> None:
        if not self.files:
            raise UsageError("There is no text to train on.", _HINT)
        for file in self.files:
            if file.suffix not in (".txt", ".jsonl") or not file.is_file():
                raise UsageError(f"{file} is not a text file.", _HINT)

    def digest(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            with _reading(file), file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def tokenise(self, path: Path) -> TokenFile:
        """Writes all documents to a file, each behind the begin token."""
        return write_tokens(path, self._documents())

    def tokens(self, work: Path) -> TokenFile:
        """The tokenised text, written to a working folder once."""
        path = work / f"text-{self.digest()[:16]}.u32"
        return open_tokens(path) if path.exists() else self.tokenise(path)

    def prompts(self, most: int) -> list[NDArray[np.int64]]:  # (n,) each
        """Beginnings of documents, and dialogues up to a reply, spread over the files; at most `most`."""
        found = [place for document in self._read() for place in _openings(document)]
        step = max(1, len(found) // most)
        texts = [
            place[: 16 * _OPENING] if isinstance(place, str) else self._render(place, True)
            for place in found[::step][:most]
        ]
        encodings = self.target.tokenizer.encode_batch(texts, add_special_tokens=False)
        pairs = zip(found[::step], map(self._with_begin, encodings), strict=False)
        return [ids[: _OPENING + 1] if isinstance(place, str) else ids for place, ids in pairs]

    def _read(self) -> Iterator[str | list[Any]]:
        for file in self.files:
            yield from _read(file)

    def _documents(self) -> Iterator[NDArray[np.int64]]:
        stream = self._read()
        while documents := list(islice(stream, _AT_ONCE)):
            texts = [d if isinstance(d, str) else self._render(d, False) for d in documents]
            yield from map(self._with_begin, self.target.tokenizer.encode_batch(texts, add_special_tokens=False))

    def _with_begin(self, encoding: Any) -> NDArray[np.int64]:
        begin = self.target.begin
        ids = encoding.ids
        return np.array(ids if begin is None or ids[:1] == [begin] else [begin, *ids], np.int64)

    def _render(self, messages: Sequence[Any], replying: bool) -> str:
        try:
            return str(self._template.render(messages=list(messages), add_generation_prompt=replying))
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise TemplateError(f"The chat template cannot render a dialogue: {error}.", _HINT) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.target.template is None:
            raise TemplateError("The model has no chat template.", 'Give lines with "text" instead of "messages".')
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            return environment.from_string(self.target.template)
        except jinja2.TemplateError as error:
            raise TemplateError(f"The chat template is malformed: {error}.", "Correct it.") from error


def _openings(document: str | list[Any]) -> Iterator[str | list[Any]]:
    """Beginnings to continue: the document itself, or a dialogue up to each request."""
    if isinstance(document, str):
        yield document
        return
    for index, message in enumerate(document):
        if isinstance(message, dict) and message.get("role") == "user":
            yield document[: index + 1]


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turns errors of reading a text file into a UsageError."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"Cannot read {file}: {error}.", _HINT) from error


def _read(file: Path) -> Iterator[str | list[Any]]:
    """Documents of a file, and dialogues as lists of messages."""
    with _reading(file), file.open(encoding="utf-8") as stream:
        if file.suffix == ".txt":
            kept: list[str] = []
            for line in stream:
                before, *others = line.split(SEPARATOR)
                kept.append(before)
                for other in others:
                    yield from filter(None, ["".join(kept).strip()])
                    kept = [other]
            yield from filter(None, ["".join(kept).strip()])
            return
        for line in stream:
            if not line.strip():
                continue
            entry = json.loads(line)
            document = entry["messages"] if "messages" in entry else entry["text"]
            if not isinstance(document, str | list):
                raise TypeError("a line has neither text nor messages")
            if document:
                yield document
