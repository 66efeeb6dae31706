"""Measures passes: what they have to do, what they cost, the decoding's share, how well they predict."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import is_looked_up
from edgeinfer.core.errors import UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ComputeUse, PassWork
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import HEAD_ROWS, Pass
from edgeinfer.runtime.decoding.sequence import Sequence, Strategy, run_alone
from edgeinfer.runtime.layer_skip.strategy import divergence
from edgeinfer.runtime.sampling.distributions import Logits, token_logprobs
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.speculation.selfcheck import filler_tokens

# Rows of a pass whose logits are all asked for: 16 of a 152k vocabulary are 10 MB. Where the head runs apart, plans
# count fewer rows of logits, and it is asked for those.
_ROWS = 16


@dataclass(frozen=True)
class TokenScores:
    """How a model predicts a given text: log-probabilities (S - 1,) of all tokens but the first, the likeliest (S,)
    after each."""

    logprobs: NDArray[np.float64]
    best: NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability."""
        return float(np.exp(-self.logprobs.mean()))


class _Greedy(Sampler):
    """Takes the most likely token."""

    def __init__(self) -> None:
        """Nothing is asked for."""

    def sample(self, logits: Logits, position: int, path: abc.Sequence[int] = ()) -> int:  # (V,)
        return int(logits.argmax())

    def accept(self, token: int, logits: Logits) -> None:  # (V,)
        """Nothing depends on the tokens before."""


def _filler(sequence: Sequence, count: int) -> list[int]:
    tokens: list[int] = filler_tokens(sequence.backend, count).tolist()
    return tokens


def _require_room(sequence: Sequence, tokens: int) -> None:
    capacity = sequence.cache.capacity
    if tokens > capacity:
        message = f"Measuring needs {tokens} tokens of context, there are {capacity}."
        raise UsageError(message, "Load with a larger context.")


def pass_work(tensors: Iterable[TensorEntry], tokens: int, rows: int) -> PassWork:
    """What a pass over `tokens` new tokens with `rows` logit rows has to do, by the table of a bundle's weights."""
    # The embedding is looked up by rows; a head that shares its bytes is listed by its own name.
    through = [
        (tensor, rows if tensor.name == "head" else tokens) for tensor in tensors if not is_looked_up(tensor.name)
    ]
    if not through:
        raise UsageError("The bundle does not list its weights.", "Use one exported natively.")
    read = sum(tensor.nbytes for tensor, count in through if count)
    return PassWork(read, sum(tensor.size * count for tensor, count in through if len(tensor.shape) == 2))


def attention_work(spec: DecoderSpec, kv_bytes_per_token: int, tokens: int, past: int) -> PassWork:
    """What attention adds to a pass over `tokens` new tokens behind `past`: keys and values are read once for
    all rows."""
    read, multiplied, latent = 0, 0, spec.latent
    for layer in range(spec.num_layers):
        window = spec.window(layer) or past + tokens
        read += past + tokens - max(past + 1 - window, 0)
        channels = 2 * spec.heads(layer).q_size if latent is None else spec.num_heads * (latent.met_size + latent.rank)
        multiplied += channels * sum(min(past + row + 1, window) for row in range(tokens))
    return PassWork(0, multiplied, kv_bytes_per_token * read // spec.num_layers)


def pass_times(sequence: Sequence, sizes: abc.Sequence[int], *, past: int, repeats: int) -> dict[int, list[float]]:
    """Milliseconds of passes over each number of tokens, all logit rows, after `past` cached tokens; sizes take
    turns."""
    _require_room(sequence, past + max(sizes))
    backend, cache = sequence.backend, sequence.cache
    if past:
        run_alone(sequence.prepare(_filler(sequence, past + 1), past))
    else:
        sequence.forget()
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for size in sizes:
            tokens, rows = np.array(_filler(sequence, size)), np.arange(size)
            started = time.perf_counter()
            backend.forward([(cache, Pass(tokens, rows + past, rows))])
            if repeat:  # the first round warms up
                times[size].append((time.perf_counter() - started) * 1e3)
            cache.trim(past)
    return times


def prefill_times(sequence: Sequence, tokens: int, *, repeats: int) -> list[float]:
    """Milliseconds of evaluating a prompt of `tokens` tokens, in the sequence's chunks, until its last row's logits."""
    times = [work_times(sequence, tokens, 0, past=0).ms for _ in range(repeats)]
    sequence.forget()
    return times


def decode_times(sequence: Sequence, tokens: int, *, past: int) -> list[float]:
    """Milliseconds of each token that is decoded greedily after `past` others."""
    _require_room(sequence, past + tokens)
    sequence.forget()
    steps = sequence.generate(_filler(sequence, past), _Greedy(), max_tokens=tokens + 1, stop_ids=frozenset())
    times = [step.ms for step in steps]
    sequence.forget()
    # The first token carries the prompt.
    return times[1:]


@dataclass(frozen=True)
class WorkTimes:
    """A prompt evaluated and tokens decoded: milliseconds of both together, and the tokens."""

    ms: float
    token_ids: tuple[int, ...]


def work_times(sequence: Sequence, prompt: int, reply: int, *, past: int) -> WorkTimes:
    """Evaluate a prompt behind `past` untimed tokens, then decode greedily in `reply` passes."""
    if prompt < 0 or reply < 0 or past < 0 or prompt + reply == 0:
        raise UsageError("There is nothing to time.", "Give a prompt or a reply of at least one token.")
    _require_room(sequence, past + prompt + reply)
    # Decoding needs a token to begin with; a prompt's last one gives the reply's first without a pass of its own.
    tokens = _filler(sequence, max(past + prompt, 1))
    ready = past if prompt else len(tokens) - 1
    if ready:
        run_alone(sequence.prepare(tokens[: ready + 1], ready))
    else:
        sequence.forget()
    count = reply + 1 if prompt else reply
    steps = list(sequence.generate(tokens, _Greedy(), max_tokens=count, stop_ids=frozenset()))
    ms = sum(step.ms for step in steps) if reply else sequence.prefill.ms
    return WorkTimes(ms, tuple(step.token for step in steps))


@dataclass(frozen=True)
class TurnTimes:
    """A prompt evaluated, then tokens decoded: milliseconds of each of the two."""

    prompt_ms: float
    reply_ms: float


def turn_times(sequence: Sequence, prompt: int, reply: int) -> TurnTimes:
    """Evaluates a prompt of this many tokens, decodes greedily for `reply` passes, and empties the cache."""
    _require_room(sequence, prompt + reply)
    sequence.forget()
    tokens = _filler(sequence, prompt)
    # The prompt's last row gives the first token.
    steps = list(sequence.generate(tokens, _Greedy(), max_tokens=reply + 1, stop_ids=frozenset()))
    prompt_ms = sequence.prefill.ms
    sequence.forget()
    return TurnTimes(prompt_ms, sum(step.ms for step in steps[1:]))


def token_logits(sequence: Sequence, tokens: abc.Sequence[int]) -> Iterator[Floats]:
    """Feed a text and yield the logits after its tokens, a few rows (R, V) at a time, as views; empties the cache."""
    if not tokens:
        raise UsageError("Nothing was given to measure.", "Give at least one token.")
    if sequence.context_shift is None:
        _require_room(sequence, len(tokens))
    sequence.forget()
    sequence.begin(len(tokens))
    return _logit_chunks(sequence, np.array(tokens, np.int64))


def _logit_chunks(sequence: Sequence, ids: NDArray[np.int64]) -> Iterator[Floats]:  # (S,) -> (R, V) each
    fed, backend = 0, sequence.backend
    while fed < len(ids):
        _require_unused(sequence, fed)
        chunk = ids[fed : fed + min(_ROWS, sequence.room())]
        fed += len(chunk)
        most = HEAD_ROWS if backend.head_apart else len(chunk)
        result = run_alone(sequence.feed(chunk.tolist(), np.arange(min(len(chunk), most))))
        states = None if result.hidden is None else result.hidden.copy()  # the head's passes overwrite them
        yield result.logits
        for start in range(most, len(chunk), most):
            assert states is not None, "all rows came at once"
            _require_unused(sequence, fed)
            yield backend.head(sequence.cache, states[start : start + most])
    sequence.forget()


def _require_unused(sequence: Sequence, fed: int) -> None:
    if sequence.fed != fed:
        raise UsageError("The model was used for something else.", "Take all logits of a text before that.")


def score_tokens(sequence: Sequence, tokens: abc.Sequence[int]) -> TokenScores:
    """Feeds a text and scores every token under the model; empties the cache."""
    if len(tokens) < 2:
        raise UsageError("Scoring needs at least two tokens.", "Give a longer text.")
    ids = np.array(tokens, np.int64)
    logprobs, best = np.empty(len(ids) - 1), np.empty(len(ids), np.int64)
    start = 0
    for logits in token_logits(sequence, tokens):  # (R, V)
        best[start : start + len(logits)] = logits.argmax(axis=1)
        targets = ids[start + 1 : start + 1 + len(logits)]
        shifted = logits[: len(targets)].astype(np.float64)
        shifted -= shifted.max(axis=1, keepdims=True)
        chosen = shifted[np.arange(len(targets)), targets]
        logprobs[start : start + len(targets)] = chosen - np.log(np.exp(shifted).sum(axis=1))
        start += len(logits)
    return TokenScores(logprobs, best)


@dataclass(frozen=True)
class ReplyReading:
    """How the tokens of a reply after its first were predicted.

    Attributes:
        logprobs: natural log-probability of each. (N,)
        divergences: of the predictions from the whole model's, in nats. (N,)
        use: what computing less did; None where all was computed in full. Its times are not those of decoding.
    """

    logprobs: NDArray[np.float64]
    divergences: NDArray[np.float64]
    use: ComputeUse | None


class _Given(Sampler):
    """Takes the tokens of a text, whatever is predicted."""

    def __init__(self, prompt: int, reply: abc.Sequence[int], whole: Floats) -> None:
        self._prompt = prompt
        self._reply = reply
        self._whole = whole  # after the prompt, and after each token of the reply but the last (N + 1, V)
        self._place = 0
        self.found: list[float] = []
        self.divergences: list[float] = []

    def sample(self, logits: Logits, position: int, path: abc.Sequence[int] = ()) -> int:  # (V,)
        return self._reply[position - self._prompt]

    def accept(self, token: int, logits: Logits) -> None:  # (V,)
        if self._place:
            self.found.append(token_logprobs(logits, token).logprob)
            self.divergences.append(divergence(self._whole[self._place], logits))
        self._place += 1


def read_reply(
    sequence: Sequence, prompt: abc.Sequence[int], reply: abc.Sequence[int], make: Callable[[Sampler], Strategy | None]
) -> ReplyReading:
    """Reads a reply, with a strategy or in full; empties the cache."""
    if not prompt or len(reply) < 2:
        raise UsageError("There is no reply to read.", "Give a prompt and at least two tokens after it.")
    text = [*prompt, *reply[:-1]]
    whole, place = np.empty((len(reply), sequence.backend.geometry.vocab_size), np.float32), 1 - len(prompt)
    for rows in token_logits(sequence, text):  # (R, V)
        wanted = rows[max(0, -place) :]
        place += len(rows)
        if len(wanted):
            whole[place - len(wanted) : place] = wanted
    sampler = _Given(len(prompt), reply, whole)
    strategy = make(sampler)
    for _ in sequence.generate(prompt, sampler, max_tokens=len(reply), stop_ids=frozenset(), strategy=strategy):
        pass
    sequence.forget()
    use = None if strategy is None else strategy.compute
    return ReplyReading(np.array(sampler.found), np.array(sampler.divergences), use)
