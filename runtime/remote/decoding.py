"""Decoding of replies that a server's model decides and this one drafts: rounds, streams, and which API is spoken."""

from __future__ import annotations

import importlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edgeinfer.core.errors import CapabilityError, ContextLengthError, RemoteError
from edgeinfer.core.options import options_of
from edgeinfer.core.options.load import VERIFIED_OPTIONS, LoadOptions
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.results import ComputeUse, RemoteUse
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.decoding import sequence as decoding
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, Strategy
from edgeinfer.runtime.kv_cache.prefix_cache import shared_length
from edgeinfer.runtime.layer_skip.entropy import Entropies, EntropyPolicy
from edgeinfer.runtime.layer_skip.strategy import entropy_bits
from edgeinfer.runtime.remote.channel import Channel, Prices
from edgeinfer.runtime.remote.contract import Decided, RemoteAccess, RemoteReply, RemoteServer
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.text.contract import TokenizerLike

# Seconds of waiting for the server before others may go on, and the reply may be cancelled.
_LOOK_S = 0.05
# Logits are needed for log-probabilities alone, which no server tells.
_UNSEEN = np.zeros(0, np.float32)
_OTHER_SERVER = "Check that an edgeinfer server with the same tokenizer runs there."


class _Answers:
    """Answers of a round, each with the time it came, passed from its thread to the one that decodes."""

    def __init__(self) -> None:
        self.came: queue.SimpleQueue[tuple[Decided | Exception, float]] = queue.SimpleQueue()
        self.wanted = True

    def take(self, decided: Decided) -> bool:
        if decided.tokens or decided.last:
            self.came.put((decided, time.perf_counter()))
        return self.wanted


class _Askers:
    """Threads that ask the server, kept because starting one delays a round. A second one exists only while a stream
    that was left still waits for its next token."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle, self._threads = threading.Semaphore(0), 0

    def do(self, work: Callable[[], None]) -> None:
        self._works.put(work)
        if not self._idle.acquire(blocking=False):
            self._threads += 1
            # It ends with the program, whatever it waits for.
            threading.Thread(target=self._run, name="edgeinfer-remote", daemon=True).start()

    def end(self) -> None:
        for _ in range(self._threads):
            self._works.put(None)
        self._threads = 0

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()
            del work  # which holds the reply
            self._idle.release()


class RemoteDecoding(Strategy):
    """Decodes one reply in rounds: this model drafts, a server verifies; or the server streams, where that is faster.
    The text is the server's, whatever is drafted. During a round, drafting goes on as if all of the draft were
    accepted. `goes_on` lets the local model write the rest where the server is lost."""

    def __init__(
        self,
        sequence: decoding.Sequence,
        sampler: Sampler,
        server: RemoteServer,
        options: Mapping[str, Any],
        channel: Channel,
        *,
        goes_on: bool,
    ) -> None:
        super().__init__(sequence, sampler)
        self._server, self._options, self._channel, self._goes_on = server, options, channel, goes_on
        self.remote: RemoteUse = RemoteUse(server.url)
        self._reply: RemoteReply | None = None
        self._answers, self._askers = _Answers(), _Askers()
        self._text: list[int] = []
        self._prompt = 0  # tokens of the text
        self._drafts: list[int] = []  # behind the text
        self._further = 0  # tokens of a stream that is under way; 0 is none
        self._streaming_since, self._came = 0.0, 0

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        if self._reply is None:
            wanted = {**self._options, "max_tokens": room}
            self._reply, self._prompt = self._server.begin(prompt, wanted), len(prompt)
        self._text = list(prompt)
        self._drafts = [self._sampler.sample(logits, len(prompt))]
        return (yield from self.next(room, 0))

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        """The tokens that one round decides, or that a stream brings."""
        if self.remote.local:
            return (yield from self._written())
        try:
            tokens = yield from self._stream(room) if self._further else self._round(room)
        except RemoteError as error:
            if not (self._goes_on and error.lost):
                raise
            self._further = 0
            return (yield from self._written())
        for token in tokens:
            self._sampler.accept(token, _UNSEEN)
        self._commit(tokens)
        return tokens

    def _round(self, room: int) -> Passes[Sequence[int]]:
        """Send a draft and return the server's tokens."""
        self._cache.hold(max(0, len(self._text) - 1))
        most = min(room - 1, self._cache.capacity - len(self._text) - 1)
        assert self._reply is not None, "a reply was started"
        length = self._length()
        if length is None:
            # Where no draft will be verified, nothing is asked again.
            tried = self._channel.tokens_of_stream() if self._reply.verifies else None
            self._further = max(1, room if tried is None else min(room, tried))
            self._came = 0
            self._ask((), self._further - 1)
            return (yield from self._stream(room))
        length, drafting_since = max(0, min(length, most)), time.perf_counter()
        while len(self._drafts) < length:
            yield from self._draft()
        draft = tuple(self._drafts[:length])
        started = time.perf_counter()
        self._ask(draft, 0)
        decided, _ = yield from self._answer(min(most, length + 1 + self._channel.ahead()))
        if not decided.tokens:
            raise _no_room()
        # Of a pass that other devices share, the server may look at the beginning of a draft alone.
        verified = length if decided.verified is None else max(0, min(decided.verified, length))
        ended, first = time.perf_counter(), not self.remote.rounds  # which evaluates the prompt
        self._channel.joins(decided.advice)
        if not first:
            self._channel.verified(verified, decided.server_ms, (ended - started) * 1e3)
        self._channel.judged(_agreeing(decided.tokens, draft), min(length, len(decided.tokens)))
        if not first:
            self._channel.went(verified, len(decided.tokens), (ended - drafting_since) * 1e3)
        self.remote.rounds += 1
        self.remote.drafted += verified
        self.remote.accepted += _agreeing(decided.tokens, draft[:verified])
        return decided.tokens

    def _length(self) -> int | None:
        """Tokens of the next draft; None lets the server stream."""
        return self._channel.length() if self._reply is not None and self._reply.verifies else None

    def _stream(self, room: int) -> Passes[Sequence[int]]:
        """The next tokens of a stream. What would have been drafted is compared with them."""
        verifies = self._reply is not None and self._reply.verifies
        decided, came = yield from self._answer(1 if verifies and self._channel.compares else 0)
        tokens = decided.tokens[:room]
        self._channel.joins(decided.advice)
        if tokens and self._came:
            self._channel.streamed(len(tokens), (came - self._streaming_since) * 1e3)
        self._came, self._streaming_since = self._came + len(tokens), came
        if decided.last:
            if not self._came:
                raise _no_room()
            self._further = 0
            if not tokens:
                return (yield from self._round(room))
        if self._drafts and verifies:
            self._channel.judged(int(self._drafts[0] == tokens[0]), 1)
        if self._further and verifies and self._channel.leaves():
            self._end_stream()
        self.remote.streamed += len(tokens)
        return tokens

    def _end_stream(self) -> None:
        self._further = 0
        self._answers.wanted = False
        self._answers = _Answers()

    def _ask(self, draft: Sequence[int], further: int) -> None:
        """Send a round; its answers come to the queue."""
        assert self._reply is not None, "a reply was started"
        remote, answers, reply = self._reply, self._answers, self._text[self._prompt :]

        def work() -> None:
            try:
                remote.verify(reply, draft, further, answers.take)
            except Exception as error:  # raised where it is waited for
                answers.came.put((error, time.perf_counter()))

        self._askers.do(work)

    def _answer(self, most: int) -> Passes[tuple[Decided, float]]:
        """The next answer, and when it came; until then, up to `most` tokens are drafted behind the text."""
        while True:
            has_room = len(self._text) + len(self._drafts) < self._cache.capacity
            busy = len(self._drafts) < most and has_room
            try:
                answer, came = self._answers.came.get(block=not busy, timeout=_LOOK_S)
            except queue.Empty:
                if busy:
                    yield from self._draft()
                else:
                    yield Evaluate(self._backend, ())  # lets others go on, or cancel it
                continue
            if isinstance(answer, Exception):
                raise answer
            if max(answer.tokens, default=0) >= self._backend.geometry.vocab_size:
                raise RemoteError(f"{self._server.url} answers with tokens that there are not.", _OTHER_SERVER)
            return answer, came

    def _draft(self) -> Passes[None]:
        started, rows = time.perf_counter(), len(self._text) + len(self._drafts) - self._cache.length
        logits = yield from self._logits()
        token = self._sampler.sample(logits, len(self._text) + len(self._drafts), self._drafts)
        self._drafts.append(token)
        if rows == 1:
            self._channel.drafted((time.perf_counter() - started) * 1e3)

    def _logits(self) -> Passes[Floats]:  # (V,)
        """The logits behind text and drafts, a view; evaluates what the cache lacks of them."""
        cache, path = self._cache, [*self._text, *self._drafts]
        if cache.length >= len(path):
            cache.trim(cache.rewindable_to(len(path) - 1))
        while True:
            tokens = path[cache.length : cache.length + self._sequence.chunk]
            end = cache.length + len(tokens)
            rows = np.array([len(tokens) - 1]) if end == len(path) else np.zeros(0, np.int64)
            positions = np.arange(cache.length, end)
            (output,) = yield Evaluate(self._backend, ((cache, Pass(np.array(tokens, np.int64), positions, rows)),))
            if end == len(path):
                logits: Floats = output.logits[0]
                return logits

    def _commit(self, tokens: Sequence[int]) -> None:
        """Adds decided tokens to the text; drafts that go on behind them stay, with their rows."""
        agreed = _agreeing(tokens, self._drafts)
        base = len(self._text)
        self._text += tokens
        self._drafts = self._drafts[agreed:] if agreed == len(tokens) else []
        cache = self._cache
        if agreed < len(tokens) and cache.length > base + agreed:
            cache.trim(cache.rewindable_to(base + agreed))
        self._root = tokens[-1]

    def _written(self) -> Passes[Sequence[int]]:
        """Write one token with the local model."""
        self.remote.local += 1
        self._drafts = []
        logits = yield from self._logits()
        token = self._sampler.sample(logits, len(self._text))
        self._text.append(token)
        return self._accept(token, logits)

    def leave(self) -> None:
        """Drops drafts, and the stream that is under way."""
        self._drafts = []
        self._end_stream()
        cache = self._cache
        if cache.length > len(self._text):
            cache.trim(cache.rewindable_to(len(self._text)))

    def finish(self) -> None:
        reply, use = self._reply, self.remote
        if reply is not None:
            use.model, use.digest, use.retries = reply.model, reply.digest, reply.retries
            reply.close()
        self._askers.end()
        use.link_ms, use.server_ms = self._channel.link_ms, self._channel.server_ms


def _agreeing(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Tokens at the beginning of a draft that are the decided ones."""
    return shared_length(np.array(tokens), np.array(draft))


def _no_room() -> ContextLengthError:
    return ContextLengthError("The server's context is full.", "Shorten the text, or load its model with more context.")


class RoutedDecoding(RemoteDecoding):
    """Writes what is easy to predict here, and has the rest decided in rounds, drafts included."""

    def __init__(self, *args: Any, policy: EntropyPolicy, **options: Any) -> None:
        super().__init__(*args, **options)
        self._policy = policy
        self.compute: ComputeUse = ComputeUse("entropy")
        self._wrote_here = False

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        tokens = yield from super().first(prompt, logits, room)
        if self._reply is not None and not self._reply.verifies:
            message = "The server decides such a reply in one piece, so no other model can write parts of it."
            raise CapabilityError(message, "Ask for greedy text, or for an edgeinfer server.")
        return tokens

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        """One token of this model's, or those that a round decides."""
        if self.remote.local:
            return (yield from super().next(room, lost))
        self._drafts = []
        logits = yield from self._logits()
        self._policy.seen(entropy_bits(logits))
        here = not self._policy.large()
        self.compute.switches += here != self._wrote_here
        self._wrote_here = here
        if here:
            token = self._sampler.sample(logits, len(self._text))
            self._text.append(token)
            tokens: Sequence[int] = self._accept(token, logits)
            self.compute.reduced += 1
        else:
            tokens = yield from super().next(room, lost)
            self._policy.large_made(len(tokens) - 1)
        self.compute.tokens += len(tokens)
        return tokens

    def _length(self) -> int | None:
        """Never stream: a stream would also write what this model is sure of."""
        return super()._length() or 0

    def finish(self) -> None:
        """Tell how much of the text each model wrote."""
        super().finish()
        use = self.compute
        use.lossless = use.reduced == 0
        use.large_share = 1 - use.reduced / use.tokens if use.tokens else None


# What speaks with servers.
_CLIENT = "edgeinfer.runtime.remote.http"
# Tokens of a draft at most.
_MOST = 32


class RemoteDeciding:
    """Makes the strategies of replies that a server decides."""

    def __init__(self, config: LoadOptions, access: RemoteAccess) -> None:
        importlib.import_module(_CLIENT)  # which raises an error where httpcore is not installed
        self._config, self._access = config, access
        self._channel = Channel(_MOST, Prices(config.remote_draft_price, config.remote_kilobyte_price))
        self._server: RemoteServer | None = None
        self._entropies: Entropies | None = None
        if config.remote_api is not None:
            self._server = _new_server(config.remote_api, access)

    def strategy(self, sequence: decoding.Sequence, sampler: Sampler, config: ReplyOptions) -> RemoteDecoding:
        server, options = self._answering(), _sent(config)
        server.check(options)
        given = (sequence, sampler, server, options | {"seed": sampler.seed}, self._channel)
        others: dict[str, Any] = {"goes_on": self._config.remote_loss == "local"}
        if config.compute == "full":
            return RemoteDecoding(*given, **others)
        self._entropies = self._entropies or Entropies()
        chosen = (config.compute_share, config.entropy_threshold, config.entropy_stay)
        return RoutedDecoding(*given, **others, policy=EntropyPolicy(self._entropies, *chosen))

    def _answering(self) -> RemoteServer:
        """The server by its API; if it does not answer now, the next reply asks again."""
        if self._server is None:
            api = _find_api(self._access)
            server = _new_server(api or "edgeinfer", self._access)
            if api is None:
                return server
            self._server = server
        return self._server


def remote_deciding(
    config: LoadOptions, tokenizer: TokenizerLike, begin_ids: tuple[int, ...], end_ids: frozenset[int]
) -> RemoteDeciding:
    """Set up replies that the configured server decides."""
    assert config.remote is not None
    url = config.remote.rstrip("/").removesuffix("/v1")
    given = (config.remote_key, config.remote_model, config.remote_digest)
    return RemoteDeciding(config, RemoteAccess(url, *given, tokenizer, begin_ids, end_ids))


def _sent(config: ReplyOptions) -> dict[str, Any]:
    """Non-default options in the form of /v1/verify."""
    declared = options_of(ReplyOptions)
    given = {name: value for name in VERIFIED_OPTIONS if (value := getattr(config, name)) != declared[name].default}
    if bias := config.logit_bias:
        given["logit_bias"] = {str(token): False if value == -math.inf else value for token, value in bias.items()}
    return given


def _new_server(api: str, access: RemoteAccess) -> RemoteServer:
    # Here, as few programs need an HTTP client.
    from edgeinfer.runtime.remote.edgeinfer_server import EdgeInferServer
    from edgeinfer.runtime.remote.openai_server import OpenAIServer

    return EdgeInferServer(access) if api == "edgeinfer" else OpenAIServer(access)


def _find_api(access: RemoteAccess) -> str | None:
    """Find a server's API by the owner of its models; None if it does not answer now."""
    from edgeinfer.runtime.remote.http import UNANSWERED, Connection

    connection = Connection(access)
    try:
        owner = str(connection.get("/v1/models")["data"][0]["owned_by"])
    except UNANSWERED:
        return None
    except (ValueError, TypeError, KeyError, IndexError):
        return "openai"
    finally:
        connection.close()
    return owner if owner == "edgeinfer" else "openai"
