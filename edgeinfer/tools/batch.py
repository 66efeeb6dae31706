"""Answers a file of requests, several in shared passes, and continues after a run that was killed. Requests are read a
line at a time, and each reply is on disk before the next one starts, so that a kill loses none."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from filelock import FileLock, Timeout

from edgeinfer.bundle.writing import new_file, storage_errors
from edgeinfer.core.errors import PromptError, TemplateError, UnshareableError, UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Progress
from edgeinfer.core.user_files import decode_text, marked_encoding
from edgeinfer.openai import answering, completed, make_completion
from edgeinfer.openai.batch import BatchRequest, answer_line, damaged_line, read_id, read_object, read_request
from edgeinfer.openai.errors import RequestError

if TYPE_CHECKING:
    from edgeinfer.batching import Making
    from edgeinfer.model import Model

# Bytes of a line: the longest contexts, ten million tokens, hold less text.
_MOST_LINE = 64 * 1000**2
_VERSION = 1


@dataclass(frozen=True)
class BatchSummary:
    """The result of a run over a file of requests."""

    requests: int  # lines of the file, all of which are answered
    failed: int  # lines whose answer is an error
    resumed: int  # lines that an earlier run had answered
    seconds: float  # of this run

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON's types."""
        return dataclasses.asdict(self)


def answer_batch(
    model: Model,
    requests: BatchInput,
    output: Path,
    *,
    parallel: int,
    defaults: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> BatchSummary:
    """Answers a file of requests. Prompts with a common beginning are answered one after the other."""
    started = time.perf_counter()
    info = model.info
    origin = {
        "input": requests.sha256,
        "model": [info.name, info.architecture, info.parameters, info.bits_per_weight],
        "defaults": dict(defaults or {}),
    }
    with ReplyFile(output, origin) as replies:

        def report() -> None:
            if progress is not None:
                progress("replies", len(replies.done), len(requests.lines))

        resumed = len(replies.done)
        report()
        for line in _Answering(model, requests, defaults or {}, parallel).answer(replies.done):
            replies.append(line)
            report()
        replies.finish()
        return BatchSummary(len(replies.done), replies.failed, resumed, time.perf_counter() - started)


@dataclass(frozen=True)
class BatchLine:
    number: int  # of the line, from 1
    # `offset`, `size`: its place in the file, in bytes.
    offset: int
    size: int
    custom_id: str | None  # of its request; None where that cannot be read
    error: RequestError | None = None  # why it holds no request; None where it does


@dataclass(frozen=True)
class BatchInput:
    """A file of requests, all lines of which were checked; empty ones are left out."""

    path: Path
    lines: tuple[BatchLine, ...]
    sha256: str  # of the file
    text: bytes | None = None  # the file in UTF-8, where its own encoding is another

    @classmethod
    def open(cls, path: Path) -> Self:
        digest = hashlib.sha256()
        try:
            text = _converted(path)
            with _opened(path, text) as file:
                lines = tuple(_lines(file, digest.update))
        except OSError as error:
            raise PromptError(f"Cannot read {path}: {error.strerror}.", "Name a file of requests.") from error
        if not lines:
            raise PromptError(f"{path} has no requests.", "Write one JSON object a line.")
        named = [line for line in lines if line.custom_id is not None]
        twice = next((name for name, count in Counter(line.custom_id for line in named).items() if count > 1), None)
        if twice is not None:
            first, second, *_ = (line.number for line in named if line.custom_id == twice)
            message = f"Lines {first} and {second} have the same custom_id {twice!r}."
            raise UsageError(message, "Give every line one of its own, or none.")
        return cls(path, lines, digest.hexdigest(), text)

    def read(self, lines: Iterable[BatchLine]) -> Iterator[dict[str, Any]]:
        """The objects of lines that hold requests, one after the other."""
        with _opened(self.path, self.text) as file:
            for line in lines:
                file.seek(line.offset)
                yield read_object(file.read(line.size))


def _converted(path: Path) -> bytes | None:
    """A file of UTF-16 or UTF-32 with a byte order mark, in UTF-8; None for other files."""
    with path.open("rb") as file:
        if marked_encoding(file.read(4)) in (None, "utf-8-sig"):
            return None
        file.seek(0)
        return decode_text(file.read(), path).encode("utf-8", "surrogatepass")


def _opened(path: Path, text: bytes | None) -> BinaryIO:
    return path.open("rb") if text is None else io.BytesIO(text)


def _lines(file: BinaryIO, update: Callable[[bytes], object]) -> Iterator[BatchLine]:
    number = offset = 0
    while data := file.readline(_MOST_LINE):
        update(data)
        number, size, rest = number + 1, len(data), data
        while not rest.endswith(b"\n") and (rest := file.readline(_MOST_LINE)):
            update(rest)
            size += len(rest)
        if data.strip() or size > len(data):
            yield _line(data if size == len(data) else None, BatchLine(number, offset, size, None))
        offset += size


def _line(data: bytes | None, line: BatchLine) -> BatchLine:
    try:
        if data is None:
            message = f"The line is larger than {format_size(_MOST_LINE)}."
            raise RequestError(message, "Shorten its prompt.", code="invalid_line")
        fields = read_object(data)
        line = dataclasses.replace(line, custom_id=read_id(fields, line.number))
        read_request(fields, {})
    except RequestError as error:
        return dataclasses.replace(line, error=error)
    return line


@dataclass(frozen=True)
class ReplyLine:
    number: int  # of that line
    reply: Mapping[str, Any]  # the object of the output's line
    failed: bool  # whether it is an error


class ReplyFile:
    """The replies of a batch, kept in a file next to the output and written in the order of the requests at the end.
    Replies of an earlier run are taken over where they have the same `origin`, and else refused."""

    def __init__(self, output: Path, origin: Mapping[str, Any]) -> None:
        # The file that keeps replies until all are there; each is on disk before the next one starts.
        self.partial = self.partial_of(output)
        self._output = output
        self._places: dict[int, tuple[int, int]] = {}  # offset and size, by the request's line
        self._failed: set[int] = set()
        self._size = 0
        self._handle: int | None = None
        self._lock = FileLock(f"{self.partial}.lock")
        try:
            with storage_errors(self.partial):
                self._lock.acquire(timeout=0)
            self._resume(_encoded({"edgeinfer_batch": _VERSION, **origin}))
        except Timeout as error:
            raise UsageError(f"Another run is writing {self.partial}.", "Let it end, or end it.") from error
        except BaseException:
            self.close()
            raise

    @staticmethod
    def partial_of(output: Path) -> Path:
        """The file in which replies are kept until all are there."""
        return output.with_name(f"{output.name}.partial")

    @property
    def done(self) -> frozenset[int]:
        """Lines of requests that have been answered."""
        return frozenset(self._places)

    @property
    def failed(self) -> int:
        """How many answers are errors."""
        return len(self._failed)

    def append(self, line: ReplyLine) -> None:
        """Keeps a reply, which is on disk when this returns."""
        data, offset = _encoded({"line": line.number, "failed": line.failed, "reply": line.reply}), self._size
        self._write(data)
        self._note(line.number, line.failed, offset, len(data))

    def finish(self) -> None:
        """Writes the output, the replies in the order of the requests, and removes the partial file."""
        with self.partial.open("rb") as kept, new_file(self._output) as output:
            for _, (offset, size) in sorted(self._places.items()):
                kept.seek(offset)
                output.write(_encoded(json.loads(kept.read(size))["reply"]))
        self.close()
        self.partial.unlink()
        Path(self._lock.lock_file).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file, which stays as it is."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(self, head: bytes) -> None:
        """Reads the replies of an earlier run, up to the first line that is not whole, and cuts off the rest."""
        with storage_errors(self.partial):
            handle = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        self._handle = handle
        with self.partial.open("rb") as kept:
            first = kept.readline()
            if first == head:
                self._size = len(first)
                while (entry := _whole(data := kept.readline())) is not None:
                    self._note(entry["line"], entry["failed"], self._size, len(data))
                    self._size += len(data)
            elif not head.startswith(first):
                found, wanted = _whole(first) or {}, json.loads(head)
                differing = ", ".join(name for name in wanted if found.get(name) != wanted[name])
                message = f"{self.partial} is of another batch: it differs in {differing}."
                raise UsageError(message, "Delete it to begin again, or choose another output.")
        with storage_errors(self.partial):
            os.ftruncate(handle, self._size)
        if not self._size:
            self._write(head)

    def _write(self, data: bytes) -> None:
        assert self._handle is not None, "it was not closed"
        with storage_errors(self.partial):
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(self._handle, left) :]
                os.fsync(self._handle)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, self._size)
                raise
        self._size += len(data)

    def _note(self, number: int, failed: bool, offset: int, size: int) -> None:
        self._places[number] = (offset, size)
        if failed:
            self._failed.add(number)


def _whole(data: bytes) -> dict[str, Any] | None:
    """The object of a line; None where the line is not whole."""
    if not data.endswith(b"\n"):
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _encoded(value: Mapping[str, Any]) -> bytes:
    # Escaped, so that half of a surrogate pair is no error.
    return json.dumps(value).encode("ascii") + b"\n"


@dataclass(frozen=True)
class _Answering:
    model: Model
    requests: BatchInput
    defaults: Mapping[str, Any]
    parallel: int

    def answer(self, done: frozenset[int]) -> Iterator[ReplyLine]:
        """The replies to lines that have none yet, as they come."""
        left = [line for line in self.requests.lines if line.number not in done]
        for line in left:
            if line.error is not None:
                yield ReplyLine(line.number, damaged_line(line.number, line.custom_id, line.error), failed=True)
        alone = self._grouped([line for line in left if line.error is None])
        if self.parallel > 1 and self.model.can_batch:
            alone = yield from self._share_passes(alone)
        for line, request in self._read(alone):
            yield completed(self._reply(line, request))

    def _share_passes(self, lines: list[BatchLine]) -> Generator[ReplyLine, None, list[BatchLine]]:
        """Replies that share passes; returns the lines whose replies cannot."""
        alone: list[BatchLine] = []

        with closing(self.model.reply_batch(self.parallel, streamed=False)) as batch:
            for outcome in batch.as_completed(self._reply(*each, shares=True) for each in self._read(lines)):
                if isinstance(outcome.error, UnshareableError):
                    alone.append(lines[outcome.place])
                else:
                    yield outcome.result()
        return alone

    def _grouped(self, lines: list[BatchLine]) -> list[BatchLine]:
        """The lines in an order in which prompts with a common beginning are neighbours."""
        keys = [_prompt_key(fields.get("body", fields)) for fields in self.requests.read(lines)]
        return [lines[place] for place in sorted(range(len(lines)), key=lambda place: keys[place])]

    def _read(self, lines: list[BatchLine]) -> Iterator[tuple[BatchLine, BatchRequest]]:
        for line, fields in zip(lines, self.requests.read(lines), strict=True):
            yield line, read_request(fields, self.defaults)

    def _reply(self, line: BatchLine, request: BatchRequest, *, shares: bool = False) -> Making[ReplyLine]:
        """Make the answer to a request, which may be an error."""
        assert line.custom_id is not None, "lines without one hold no request"
        try:
            completion = make_completion(request.kind, request.body, self.model)
            answer = yield from answering(self.model, completion)
            return ReplyLine(line.number, answer_line(line.custom_id, answer), failed=False)
        except (UsageError, TemplateError) as error:
            if shares and isinstance(error, UnshareableError):
                raise
            return ReplyLine(line.number, answer_line(line.custom_id, error), failed=True)


def _prompt_key(body: Mapping[str, Any]) -> str:
    """A text by which requests with similar prompts are neighbours. Templates put functions first."""
    prompt = body.get("messages", body.get("prompt"))
    return prompt if isinstance(prompt, str) else json.dumps([body.get("tools"), prompt], sort_keys=True)
