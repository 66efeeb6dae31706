"""The constraint that a reply follows a grammar, by llguidance."""

from __future__ import annotations

import codecs
import time
from collections.abc import Collection
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import BackendError, GrammarError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.sampling.constraint import ConstraintPlaces, TextPlaces
from edgeinfer.runtime.sampling.grammar_source import grammar_source, in_words
from edgeinfer.runtime.sampling.grammar_tokens import GrammarVocabulary, NumberLimit, engine
from edgeinfer.runtime.sampling.grammar_trial import ENGINE_LIMITS, needs_trial, tried, wrong


@dataclass
class GrammarCosts:
    """What following a grammar took."""

    # From its source to the first token, with the model's vocabulary where that was not made yet.
    compile_ms: float = 0.0
    # Of each time it was asked what may follow, drafted places included.
    mask_ms: list[float] = field(default_factory=list)


class GrammarConstraint:
    """Implements `constraint.Constraint`: the reply is a text of a grammar, by `grammar_source`, and then a stop token.
    How a text is spelled in tokens is the model's choice, so that what is drawn depends on the grammar alone. Where the
    text is certain, `forced` guesses a spelling: the longest tokens first."""

    def __init__(self, vocabulary: GrammarVocabulary, source: str, end_ids: Collection[int]) -> None:
        started = time.perf_counter()
        if not end_ids:
            raise UsageError("A reply by a grammar needs a stop token.", "Add at least one stop token.")
        self._size = vocabulary.size
        self._ends = frozenset(end_ids)
        self._end_ids = np.unique(np.array(list(end_ids), np.int64))  # (E,)
        self._end_ids.setflags(write=False)
        self._tokens = vocabulary.tokens
        self._matcher = _compiled(self._tokens, source)
        self._numbers = NumberLimit(source, vocabulary.digits, vocabulary.text_of) if "%json" in source else None
        self._beyond = 0  # tokens on top that may not follow, or follow an end; the engine knows nothing of them
        self._reply: list[int] = []  # tokens below those
        self._known: NDArray[np.int64] | None = None  # what may follow now, where it was asked for
        if not len(self._mask()):
            raise _unusable("this model has no token that a text of it begins with")
        self.costs = GrammarCosts((time.perf_counter() - started) * 1e3)

    def allowed(self) -> NDArray[np.int64]:  # (A,)
        if self._beyond:
            return self._end_ids
        if self._known is None:
            started = time.perf_counter()
            self._known = self._mask()
            self.costs.mask_ms.append((time.perf_counter() - started) * 1e3)
        return self._known

    def forced(self) -> list[int]:
        """Tokens that spell what must follow; empty where there is a choice of texts, or only the end follows."""
        if self._beyond:
            return []
        data = self._matcher.compute_ff_bytes()
        self._check()
        if not data:
            return []
        tokens = self._spelled(data)
        # The last one may be the beginning of a longer token that ends behind what is certain.
        if len(tokens) > 1:
            return tokens[:-1]
        return tokens if len(self.allowed()) == 1 else []

    def push(self, token: int) -> None:
        self._known = None
        if not self._beyond and self._may_follow(token):
            self._reply.append(token)
        else:
            self._beyond += 1

    def pop(self, count: int = 1) -> None:
        assert 0 <= count <= len(self._reply) + self._beyond, "popping more tokens than were pushed"
        if not count:
            return
        self._known = None
        beyond = min(count, self._beyond)
        self._beyond -= beyond
        if count > beyond:
            del self._reply[beyond - count :]
            self._matcher.rollback(count - beyond)
            self._check()

    def places(self) -> ConstraintPlaces:
        return TextPlaces(self)

    def _may_follow(self, token: int) -> bool:
        """Feed the engine a token if it may follow."""
        if token in self._ends or not 0 <= token < self._size:
            return False
        taken = self._matcher.try_consume_tokens([token])
        self._check()
        return bool(taken)

    def _mask(self) -> NDArray[np.int64]:  # (A,)
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        # The stop tokens go by the end of the grammar, the id behind the model's, not by what they spell.
        may_end = bool(bits[self._size])
        bits = bits[: self._size]
        bits[self._end_ids] = may_end
        ids = np.flatnonzero(bits.view(np.bool_))
        ids.setflags(write=False)
        if not len(ids) and self._reply:
            raise UsageError("The reply cannot go on by its grammar.", "It was left no token that leads to an end.")
        return ids if self._numbers is None else self._numbers.within(ids, self._end_ids, self._reply)

    def _spelled(self, data: bytes) -> list[int]:
        try:
            text, _ = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:  # it begins inside a character
            return []
        tokens: list[int] = self._tokens.greedy_tokenize(text)
        stop = next((index for index, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[:stop]

    def _check(self) -> None:
        if self._matcher.is_error():
            message = f"The reply's grammar became too complex after {len(self._reply)} tokens: "
            raise UsageError(message + f"{in_words(self._matcher.get_error())}.", "Simplify it, or bound repetitions.")


def check_grammar(config: ReplyOptions) -> None:
    """Refuse a form of replies that takes too much to compile, which may take seconds. Thread-safe."""
    source = grammar_source(config)
    if source is not None:
        _try(source)


def fault(source: str) -> str:
    """Describe the error of a grammar in the engine's words; empty if it is valid. Thread-safe."""
    try:
        return _tried(source)
    except TimeoutError as error:  # which is not kept, other than what is wrong with it
        message = "Whether the schema or grammar can be used was not found out in time."
        raise BackendError(message, "The machine was busy or asleep: ask again.") from error


def _try(source: str) -> None:
    if needs_trial(source) and (found := fault(source)):
        raise _unusable(in_words(found))


def _compiled(tokens: Any, source: str) -> Any:
    library = engine()
    _try(source)
    matcher = library.LLMatcher(tokens, source, log_level=0, limits=library.LLParserLimits(**ENGINE_LIMITS))
    if not matcher.is_error():
        # Whether anything follows it shows only here.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise _unusable(in_words(matcher.get_error()))
    return matcher


@lru_cache(maxsize=32)
def _tried(source: str) -> str:
    library = engine()
    return tried(source, library) if needs_trial(source) else wrong(source)


def _unusable(reason: str) -> GrammarError:
    if "NoExtension" in reason:
        reason = "no text at all satisfies it"
    return GrammarError(f"The schema or grammar cannot be used: {reason}.", "Change that part, or leave it out.")
