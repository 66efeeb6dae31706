"""Answers a file of requests, several in passes that they share, and goes on where a run that was killed left off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import TemplateError, UnshareableError, UsageError
from edgeinfer.openai import make_completion, whole
from edgeinfer.openai.batch import BatchRequest, answer_line, damaged_line, read_request
from edgeinfer.records import dataclass
from edgeinfer.results import Progress
from edgeinfer.tools.batch_files import BatchInput, BatchLine, ReplyFile, ReplyLine

if TYPE_CHECKING:
    from edgeinfer.api import Model


_STAGE = "replies"


@dataclass(frozen=True)
class BatchSummary:
    """What a run over a file of requests did.

    Attributes:
        requests: lines of the file, all of which are answered.
        failed: those whose answer tells an error.
        resumed: those that a former run had answered.
        seconds: of this run.
    """

    requests: int
    failed: int
    resumed: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in ("requests", "failed", "resumed", "seconds")}


def answer_batch(
    model: Model,
    requests: BatchInput,
    output: Path,
    *,
    parallel: int,
    defaults: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> BatchSummary:
    """Answers a file of requests. Those that begin alike are answered one after the other.

    Args:
        progress: called with a stage, the replies that are there, and all.
    """
    started = time.perf_counter()
    info = model.info
    made_of = {
        "input": requests.sha256,
        "model": [info.name, info.architecture, info.parameters, info.bits_per_weight],
        "defaults": dict(defaults or {}),
    }
    tell = progress or _ignored
    with ReplyFile(output, made_of) as replies:
        resumed = len(replies.done)
        tell(_STAGE, resumed, len(requests.lines))
        for line in _Answering(model, requests, defaults or {}, parallel).answer(replies.done):
            replies.append(line)
            tell(_STAGE, len(replies.done), len(requests.lines))
        replies.finish()
        return BatchSummary(len(replies.done), replies.failed, resumed, time.perf_counter() - started)


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
        sound = self._grouped([line for line in left if line.error is None])
        alone = sound
        if self.parallel > 1 and self.model.can_batch:
            alone = []
            yield from self._side_by_side(sound, alone)
        for line, request in self._read(alone):
            yield self._reply(line, request)

    def _side_by_side(self, lines: list[BatchLine], alone: list[BatchLine]) -> Iterator[ReplyLine]:
        """Replies in passes that they share; `alone` is given the lines of those that cannot."""

        def maker(line: BatchLine, request: BatchRequest) -> Callable[[], ReplyLine]:
            return lambda: self._reply(line, request, shares=True)

        with closing(self.model.reply_batch(self.parallel, streamed=False)) as batch:
            for outcome in batch.as_completed(maker(*each) for each in self._read(lines)):
                if isinstance(outcome.error, UnshareableError):
                    alone.append(lines[outcome.place])
                else:
                    yield outcome.result()

    def _grouped(self, lines: list[BatchLine]) -> list[BatchLine]:
        """Lines whose prompts begin alike beside each other."""
        keys = [_prompt_key(fields.get("body", fields)) for fields in self.requests.read(lines)]
        return [lines[place] for place in sorted(range(len(lines)), key=lambda place: keys[place])]

    def _read(self, lines: Iterable[BatchLine]) -> Iterator[tuple[BatchLine, BatchRequest]]:
        lines = list(lines)
        for line, fields in zip(lines, self.requests.read(lines), strict=True):
            yield line, read_request(fields, self.defaults)

    def _reply(self, line: BatchLine, request: BatchRequest, *, shares: bool = False) -> ReplyLine:
        """The answer to a request, which may be what is wrong with it."""
        assert line.custom_id is not None, "lines without one hold no request"
        try:
            completion = make_completion(request.kind, request.body, self.model)
            return ReplyLine(line.number, answer_line(line.custom_id, whole(self.model, completion)), failed=False)
        except (UsageError, TemplateError) as error:
            if shares and isinstance(error, UnshareableError):
                raise
            return ReplyLine(line.number, answer_line(line.custom_id, error), failed=True)


def _prompt_key(body: Mapping[str, Any]) -> str:
    """A text by which requests with alike prompts are neighbours. Templates put functions first."""
    prompt = body.get("messages", body.get("prompt"))
    return prompt if isinstance(prompt, str) else json.dumps([body.get("tools"), prompt], sort_keys=True)


def _ignored(stage: str, done: int, total: int) -> None:
    """Where no progress is shown."""
