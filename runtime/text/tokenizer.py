"""Text to token ids and back through the `tokenizers` library, and bounds of the memory that its tokenizers take.

The bounds were measured for version 0.23 of the library on vocabularies of 512 to 152,000 tokens (docs/log). A token
takes the same however long the file; hash tables of a power of two of buckets, eight for seven tokens or more, come on
top. Parsing a second time takes more than the first. Words that were seen are kept, up to `SEEN_WORDS` of them.
"""

from __future__ import annotations

import json
import mmap
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from edgeinfer.bundle.array_file import ArrayFileError
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tokenizer_table import TABLE, TokenizerTable
from edgeinfer.core.errors import EdgeInferError, PromptError, TokenizerError
from edgeinfer.runtime.system.memory import allocating, apart, require_room
from edgeinfer.runtime.text.contract import SPECIAL

# Gemma's 256k vocabulary, the largest in common use, takes 34 MB; anything near this cap is not a tokenizer.
MAX_FILE_BYTES = 256 * 1024**2
# Characters that are encoded within a millisecond or two.
SHORT = 4096
# Of a private use plane: normalizers leave them alone, and a name cannot be guessed.
_FIRST, _COUNT, _LENGTH = 0xF0000, 0xFFFE, 8
_Way = tuple[bool, bool, bool, bool]
_PLAIN: _Way = (False, False, False, False)
# Quotes inside a text of a JSON file are escaped, so this is never part of one.
_PAIRS = re.compile(rb'"merges"\s*:\s*\[\s*\[')
# Words that were seen and are kept with their tokens; the library's own ten thousand take 6 MB, of which chats profit
# little.
SEEN_WORDS = 1000
_TOKEN_BYTES, _BUCKET_BYTES, _SEEN_WORD_BYTES = 190, 83, 600
# Where merges are texts, and where they are pairs.
_PARSED_TOKEN_BYTES, _PARSED_BUCKET_BYTES, _PARSER_BYTES = (320, 680), (116, 140), 2_000_000
_KEPT_BYTES = 2_000_000
_ENCODER_BYTES = 250_000


class Tokenizer:
    """A tokenizer that stays in memory; implements `contract.TokenizerLike`. It never cuts or pads a prompt."""

    _character_bytes = 160  # of a text that is encoded

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        resize = getattr(backend.model, "_resize_cache", None)  # of the library's words
        if resize is not None:
            resize(SEEN_WORDS)
        self._backend = backend
        self._size = backend.get_vocab_size(with_added_tokens=True)
        self._placeholders: SpecialPlaceholders | None = None
        # Whether special tokens are parsed is a setting of the library's object, so calls must not interleave.
        self._lock = Lock()

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        path = Path(path)
        try:
            size = path.stat().st_size
            if size > MAX_FILE_BYTES:
                raise TokenizerError(
                    f"{path} is too large for a tokenizer ({size} bytes).", f"The limit is {MAX_FILE_BYTES} bytes."
                )
            contents = path.read_bytes()
        except FileNotFoundError as error:
            raise TokenizerError(f"No tokenizer at {path}.", "Export the model again, with its tokenizer.") from error
        except OSError as error:
            raise TokenizerError(
                f"Cannot read the tokenizer {path}: {error}.", "Check the file or export again."
            ) from error
        with allocating("The tokenizer"), library_errors(f"{path} is not a usable tokenizer"):
            tokenizer = cls(apart(lambda: _parsed(contents)))
            # Some faults, such as a template naming an unknown token, only show on use.
            tokenizer.decode(tokenizer.encode("a"))
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        with self._encoding(text, parse_special):
            return self._ids(text, add_special_tokens)

    def encode_several(
        self, texts: Sequence[str | tuple[str, str]], most: int | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Token ids of texts or pairs, with special tokens around them, and which of a pair each belongs to; cut to
        `most` tokens where that is given."""
        whole = "".join(text if isinstance(text, str) else "".join(text) for text in texts)
        with self._encoding(whole, parse_special=True):
            if most is not None:
                self._backend.enable_truncation(most)
            try:
                return [(each.ids, each.type_ids) for each in self._backend.encode_batch(list(texts))]
            finally:
                self._backend.no_truncation()

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        with self._encoding("".join(parts), parse_special=False):
            if self._placeholders is None:
                self._placeholders = SpecialPlaceholders(self._backend, self._ids)
            return self._placeholders.encode(parts)

    def _ids(self, text: str, add_special_tokens: bool, placeholders: Set[int] = frozenset()) -> list[int]:
        """Encode with the library, with SPECIAL for each placeholder. A long text is encoded without holding the
        interpreter lock, which the library does for several texts only."""
        if len(text) <= SHORT:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [SPECIAL if id_ in placeholders else id_ for id_ in ids] if placeholders else ids

    @contextmanager
    def _encoding(self, text: str, parse_special: bool) -> Iterator[None]:
        """Check a text and set the library up for it."""
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise PromptError(
                    f"The text is not valid Unicode: lone surrogate at index {error.start}.",
                    "Decode the input as UTF-8.",
                ) from error
        require_room("Turning the text into tokens", self._character_bytes * len(text) + _ENCODER_BYTES)
        with self._lock, allocating("The text"), library_errors("The tokenizer failed to encode"):
            self._backend.encode_special_tokens = not parse_special
            try:
                yield
            finally:
                self._backend.encode_special_tokens = False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, without waiting while another thread encodes a long text."""
        ids = ids if self._placeholders is None else [id_ for id_ in ids if id_ not in self._placeholders.ids]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        return self._size

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(id_ for id_, token in self._added_tokens().items() if token.special)

    @cached_property
    def control_texts(self) -> Mapping[str, int]:
        # Some are spelled in another way in normalized text.
        spelled = {self.id_to_token(id_) or "": id_ for id_ in self.special_ids}
        return spelled | {token.content: id_ for id_, token in self._added_tokens().items() if token.special}

    def _added_tokens(self) -> dict[int, AddedToken]:
        return self._backend.get_added_tokens_decoder()

    def token_to_id(self, text: str) -> int | None:
        return self._backend.token_to_id(text)

    def id_to_token(self, id_: int) -> str | None:
        if self._placeholders is not None and id_ in self._placeholders.ids:
            return None
        return self._backend.id_to_token(id_)

    @cached_property
    def decoder_types(self) -> tuple[str, ...]:
        decoder = self._backend.decoder
        return tuple(_step_types(json.loads(decoder.__getstate__()))) if decoder is not None else ()


def _parsed(contents: bytes) -> tokenizers.Tokenizer:
    # The library, as all programs in its language, ends the process where memory is refused. Entries are counted
    # roughly: other objects' keys, and tokens with this text in them, are few.
    needed = parsing_bytes(len(contents), contents.count(b'":'), pairs=has_pairs(contents))
    require_room("Parsing the tokenizer", needed)
    return tokenizers.Tokenizer.from_buffer(contents)


def _step_types(decoder: dict[str, Any]) -> Iterator[str]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _step_types(step)
    else:
        yield decoder["type"]


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns the library's failures, which are bare exceptions and panics, into ours."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, MemoryError | EdgeInferError):
            raise
        # A panic of the library's Rust code derives from BaseException and its class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TokenizerError(f"{what}: {reason}.", "Check tokenizer.json or export the model again.") from error
        raise


class SpecialPlaceholders:
    """Placeholder tokens that tell the library where special tokens are, while it encodes text that looks like them.

    The library parses either all special tokens in a text or none. So further tokens are added to it where it has free
    ids, one for each way in which its special tokens treat the text around them, with names that no text contains. They
    replace the special tokens, so text is cut, normalized and split as around those. The tokenizer hides their `ids`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, encoded: Callable[[str, bool, Set[int]], list[int]]) -> None:
        self._backend = backend
        self._encoded = encoded
        added = backend.get_added_tokens_decoder()
        special = {id_: token for id_, token in added.items() if token.special}
        self._ways = {backend.id_to_token(id_): _way(token) for id_, token in special.items()}
        self._ways |= {token.content: _way(token) for token in special.values()}
        self._names = {
            way: "".join(chr(_FIRST + secrets.randbelow(_COUNT)) for _ in range(_LENGTH))
            for way in {_PLAIN, *self._ways.values()}
        }
        # How the library numbers added tokens.
        first = max(backend.get_vocab_size(with_added_tokens=False), 1 + max(added, default=-1))
        self.ids = frozenset(range(first, first + len(self._names)))
        self._added = all(backend.id_to_token(id_) is None for id_ in self.ids)
        if self._added:
            # Some normalizers drop what is no text.
            names, normalizer = self._names.values(), backend.normalizer
            kept = normalizer is None or all(name in str(normalizer.normalize_str(name)) for name in names)
            backend.add_tokens([_token(name, way, kept) for way, name in self._names.items()])
        else:
            self.ids = frozenset()

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Encode a text in parts; the library must be set to parse no special tokens."""
        if self._added:
            names = (self._names[self._ways.get(token, _PLAIN)] for token in parts[1::2])
            text = "".join(next(names) if place % 2 else part for place, part in enumerate(parts))
            ids = self._encoded(text, False, self.ids)
            if ids.count(SPECIAL) == len(parts) // 2:
                return ids
        # Each part by itself: a tokenizer that treats the beginning of a text apart does so with each.
        nothing = frozenset[int]()
        encoded = ([SPECIAL] if place % 2 else self._encoded(part, False, nothing) for place, part in enumerate(parts))
        return [id_ for ids in encoded for id_ in ids]


def _way(token: AddedToken) -> _Way:
    return token.lstrip, token.rstrip, token.single_word, token.normalized


def _token(name: str, way: _Way, kept: bool) -> AddedToken:
    lstrip, rstrip, single_word, normalized = way
    normalized = normalized and kept
    return AddedToken(name, lstrip=lstrip, rstrip=rstrip, single_word=single_word, normalized=normalized, special=False)


def kept_bytes(tokens: int, *, used: bool = True) -> int:
    """Bytes of a tokenizer that stays in memory."""
    parsed = _TOKEN_BYTES * tokens + _BUCKET_BYTES * _buckets(tokens)
    return parsed + _KEPT_BYTES + (_SEEN_WORD_BYTES * SEEN_WORDS if used else 0)


def has_pairs(contents: bytes | mmap.mmap) -> bool:
    """Whether a tokenizer.json has its merges as pairs, which the library parses in twice the memory of texts."""
    return _PAIRS.search(contents) is not None


def file_has_pairs(path: Path) -> bool:
    """Apply `has_pairs` to a file; False where it is missing or empty."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            return has_pairs(contents)
    except (OSError, ValueError):
        return False


def parsing_bytes(file_bytes: int, tokens: int, *, pairs: bool) -> int:
    """Peak bytes while a tokenizer.json is parsed, including the result."""
    parsed = _PARSED_TOKEN_BYTES[pairs] * tokens + _PARSED_BUCKET_BYTES[pairs] * _buckets(tokens)
    return file_bytes + parsed + _PARSER_BYTES


def _buckets(tokens: int) -> int:
    return 1 << (-(-tokens * 8 // 7) - 1).bit_length() if tokens else 0


# Symbols of the longest word that is kept with its tokens.
_LONGEST_SEEN = 32
# Measured on 256 symbols and on 20,000: what the library takes of itself, and of each byte of the small tokenizer.json.
_LIBRARY_BYTES, _PARSED = 1_000_000, 30
_HALF = 32
_LOWER = (1 << _HALF) - 1


class MappedTokenizer(Tokenizer):
    """Implements `contract.TokenizerLike`. The library cuts texts into words and words into symbols, by a vocabulary of
    symbols alone; the symbols of each word are merged here."""

    # The library's account of every symbol, and there are four to a token.
    _character_bytes = 300

    def __init__(self, table: TokenizerTable) -> None:
        backend = tokenizers.Tokenizer.from_buffer(table.tokenizer)
        super().__init__(backend)
        self._table = table
        self._size = table.size
        added = backend.get_added_tokens_decoder()
        self._added = {table.added[token.content]: token for token in added.values()}
        self._spelled = {table.added[token.content]: backend.id_to_token(id_) for id_, token in added.items()}
        self._special = frozenset(token.content for token in added.values() if token.special)
        # By the library's ids of symbols and added tokens, which number both from 0 on.
        ids = {id_: table.added[token.content] for id_, token in added.items()}
        self._true = dict(enumerate(table.symbols)) | ids
        # Of the table alone, so that a tokenizer does not refer to itself and goes as soon as it is not needed.
        self._merged = partial(_merged, table)
        self._seen = lru_cache(SEEN_WORDS)(self._merged)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        with allocating("The tokenizer"), library_errors(f"{path} is not a usable tokenizer"):
            try:
                tokenizer = cls(TokenizerTable(Path(path)))
            except (ArrayFileError, OSError, KeyError, ValueError) as error:
                message = f"Cannot use the tokenizer {path}: {error}."
                raise TokenizerError(message, "Export the model again.") from error
            tokenizer.decode(tokenizer.encode("a"))
        return tokenizer

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        bundle.check(TABLE)
        return cls.from_file(bundle.path / TABLE)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        # As the library does, by their texts: a special token that is spelled in another way is not left out.
        hidden = self._special if skip_special_tokens else frozenset()
        spelled = [text for text in map(self.id_to_token, ids) if text is not None and text not in hidden]
        decoder = self._backend.decoder
        return " ".join(spelled) if decoder is None else str(decoder.decode(spelled))

    def token_to_id(self, text: str) -> int | None:
        added = self._table.added.get(text)
        return self._table.id_of(text) if added is None else added

    def id_to_token(self, id_: int) -> str | None:
        spelled = self._spelled.get(id_)
        return self._table.spelling(id_) if spelled is None else spelled

    def _added_tokens(self) -> dict[int, AddedToken]:
        return self._added

    def _ids(self, text: str, add_special_tokens: bool, placeholders: Set[int] = frozenset()) -> list[int]:
        if len(text) <= SHORT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = []
        for word, symbols in groupby(zip(encoding.word_ids, encoding.ids, strict=True), key=itemgetter(0)):
            if word is None:  # what the template adds, by its ids there
                ids += [id_ for _, id_ in symbols]
                continue
            true = tuple(SPECIAL if id_ in placeholders else self._true[id_] for _, id_ in symbols)
            if len(true) == 1:
                ids += true
            else:
                ids += self._seen(true) if len(true) <= _LONGEST_SEEN else self._merged(true)
        return ids


def mapped_tokenizer_bytes(table: Path, *, used: bool) -> int:
    """Anonymous bytes of a mapped tokenizer; 0 if the table cannot be read."""
    with suppress(ArrayFileError, OSError, KeyError, ValueError):
        symbols = TokenizerTable(table).tokenizer
        return _LIBRARY_BYTES + _PARSED * len(symbols) + (SEEN_WORDS * _SEEN_WORD_BYTES if used else 0)
    return 0


def _merged(table: TokenizerTable, symbols: tuple[int, ...]) -> tuple[int, ...]:
    """Merge a word's symbols into tokens: always the pair of the lowest rank, of equal ones the leftmost."""
    merge = table.merge
    if table.whole_words:
        whole = table.id_of("".join(table.spelling(id_) or "" for id_ in symbols))
        if whole is not None:
            return (whole,)
    ids = list(symbols)
    before, after = list(range(-1, len(ids) - 1)), list(range(1, len(ids) + 1))
    # Each with the two tokens that it is of: where either was merged meanwhile, it is gone.
    pairs = ((merge(left, right), at, left, right) for at, (left, right) in enumerate(pairwise(ids)))
    found = [(merged, at, left, right) for merged, at, left, right in pairs if merged is not None]
    heapify(found)
    while found:
        merged, at, left, right = heappop(found)
        other = after[at]
        if ids[at] != left or other == len(ids) or ids[other] != right:
            continue
        ids[at], ids[other] = merged & _LOWER, SPECIAL
        end = after[at] = after[other]
        if end < len(ids):
            before[end] = at
            if (follows := merge(ids[at], ids[end])) is not None:
                heappush(found, (follows, at, ids[at], ids[end]))
        start = before[at]
        if start >= 0 and (precedes := merge(ids[start], ids[at])) is not None:
            heappush(found, (precedes, start, ids[start], ids[at]))
    return tuple(id_ for id_ in ids if id_ != SPECIAL)
