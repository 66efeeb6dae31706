"""A model of a few letters that looks at whole texts, so that a row that sees one token too many or too few says so."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.core.errors import BackendError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult, check_pass
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.sampling.constraint import Constraint
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.search.strategy import SearchParts, SearchStrategy, make_search
from tests.runtime.test_sequence import TableBackend, TableCache

LETTERS = "abcdefgh.,"
V = len(LETTERS)
END = 7
PROMPT = [1, 2, 0]


def letters_logits(text: Sequence[int]) -> Floats:  # (V,)
    """What follows a text, every token of it counting."""
    chance = np.random.default_rng(zlib.crc32(bytes(text)))
    return chance.normal(0, 1.5, V).astype(np.float32)


class LettersCache(TableCache):
    """The tokens of a text and their positions."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.places: list[int] = []

    def trim(self, length: int) -> None:
        super().trim(length)
        del self.places[length:]

    def clear(self) -> None:
        super().clear()
        self.places.clear()

    def fork(self) -> LettersCache:
        forked = LettersCache(self.capacity)
        forked.held, forked.places = list(self.held), list(self.places)
        return forked

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        assert list(rows) == sorted(set(rows))
        self.places[start:] = [self.places[start + row] for row in rows]
        super()._keep(start, rows)

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        arrays = [np.array(a[start:stop], np.float32).reshape(1, -1, 1) for a in (self.held, self.places)]
        return CopiedRows(arrays[0].shape[1], (arrays[0],), (arrays[1],))

    def append(self, snapshot: CacheSnapshot) -> None:
        if self.length + snapshot.length > self.capacity:
            raise BackendError("Full.")
        self.held += snapshot.keys[0][0, :, 0].astype(int).tolist()
        self.places += snapshot.values[0][0, :, 0].astype(int).tolist()


class LettersBackend(TableBackend):
    """Implements the contract over `letters_logits`."""

    name = "letters"
    geometry = Geometry(V, 1, 1, 1, 1, 1000)
    capabilities = Capabilities(layer_skip=False, hidden=False, tree=False)

    def __init__(self, capacity: int = 200) -> None:
        super().__init__()
        self.cache: LettersCache = LettersCache(capacity)
        self.most_held = 0

    def _forward(self, cache: KVCache, batch: Pass) -> PassResult:
        check_pass(self, cache, batch)
        assert isinstance(cache, LettersCache)
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        self._wait()
        start, size = cache.length, len(tokens)
        cache.held += tokens.tolist()
        cache.places += positions.tolist()
        self.passes.append(size)
        self.most_held = max(self.most_held, cache.length)
        assert cache.places == list(range(start + size)), "the rows of a text are one for each place"
        texts = [cache.held[: start + row + 1] for row in rows]
        logits = np.array([letters_logits(text) for text in texts], np.float32).reshape(-1, V)
        return PassResult(logits, None)


class Letters:
    """A tokenizer of one letter a token; the end has no text."""

    vocab_size = V
    special_ids = frozenset({END})
    decoder_types = ("ByteLevel",)

    @property
    def control_texts(self) -> Mapping[str, int]:
        return {}

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [LETTERS.index(letter) for letter in text if letter in LETTERS]

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[i] for i in ids if i != END)

    def token_to_id(self, text: str) -> int | None:
        return LETTERS.index(text) if text in list(LETTERS) else None

    def id_to_token(self, id_: int) -> str | None:
        return LETTERS[id_]


class Trial:
    """One reply of the letters' model, searched for as options say."""

    def __init__(
        self,
        backend: LettersBackend,
        *,
        stop_ids: frozenset[int] = frozenset({END}),
        prompt: Sequence[int] = PROMPT,
        forgets: bool = False,
        constraint: Constraint | None = None,
        **options: Any,
    ) -> None:
        self.config = ReplyOptions(**{"max_tokens": 12, "seed": 5} | options)
        self.sequence = Text(backend, backend.cache, 4)
        self.backend, self.stop_ids, self.prompt = backend, stop_ids, prompt
        self.sampler = Sampler(LogitsProcessor(self.config, V, self.config.seed or 0), prompt, constraint)
        parts = SearchParts(
            self.sequence,
            self.sampler,
            self.config,
            stop_ids,
            Letters(),
            continues=False,
        )
        self.strategy: SearchStrategy = make_search(parts, forgets=forgets)

    def tokens(self, watch: Callable[[int], None] = lambda token: None) -> list[int]:
        """The reply."""
        found, most = list[int](), self.config.max_tokens
        steps = self.sequence.generate(
            self.prompt, self.sampler, max_tokens=most, stop_ids=self.stop_ids, strategy=self.strategy
        )
        for step in steps:
            found.append(step.token)
            watch(step.token)
        self.strategy.finish()
        self.check_cache(found)
        return found

    def check_cache(self, found: Sequence[int]) -> None:
        """The cache holds the text, or a beginning of it, and nothing else."""
        text = [*self.prompt, *found]
        assert self.backend.held == text[: self.backend.cache.length]
        assert self.backend.cache.places == list(range(self.backend.cache.length))
        assert self.sequence.cached_tokens == tuple(self.backend.held)
        assert self.backend.cache.length >= len(self.prompt)


def alone(seed: int, *, stop_ids: frozenset[int] = frozenset({END}), **options: Any) -> list[int]:
    """A reply drawn by itself."""
    config = ReplyOptions(**({"max_tokens": 12} | options | {"seed": seed}))
    backend = LettersBackend()
    sampler = Sampler(LogitsProcessor(config, V, seed), PROMPT)
    steps = Text(backend, backend.cache, 4).generate(PROMPT, sampler, max_tokens=config.max_tokens, stop_ids=stop_ids)
    return [step.token for step in steps]
