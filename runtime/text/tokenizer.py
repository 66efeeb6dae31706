"""Text to token ids and back through the `tokenizers` library; knows nothing of streaming, templates or models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, Self

import tokenizers

from edgeinfer.errors import EdgeInferError, PromptError, TokenizerError
from edgeinfer.runtime.system.allocation import allocating, require_room
from edgeinfer.runtime.system.memory import apart
from edgeinfer.runtime.text.footprint import SEEN_WORDS, encoding_bytes, has_pairs, parsing_bytes
from edgeinfer.runtime.text.mark_stands import MarkStands

__all__ = ["MAX_FILE_BYTES", "Tokenizer"]

# Gemma's 256k vocabulary, the largest in common use, takes 34 MB; anything near this cap is not a tokenizer.
MAX_FILE_BYTES = 256 * 1024**2
# Characters that are encoded within a millisecond or two.
_SHORT = 4096


class Tokenizer:
    """A tokenizer that stays in memory; implements `contracts.TokenizerLike`.

    Args:
        backend: the library's tokenizer. Its truncation and padding are switched off: a prompt is never cut silently.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        _bound_cache(backend)
        self._backend = backend
        self._size = backend.get_vocab_size(with_added_tokens=True)
        self._stands: MarkStands | None = None
        # Whether special tokens are parsed is a setting of the library's object, so calls must not interleave.
        self._lock = Lock()

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a tokenizer.json.

        Raises:
            TokenizerError: the file is missing, unreadable, larger than MAX_FILE_BYTES or not a tokenizer.
            BudgetError: there is not enough memory to parse it.
        """
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
        with allocating("The tokenizer"), _library_errors(f"{path} is not a usable tokenizer"):
            tokenizer = cls(apart(lambda: _parsed(contents)))
            # Some faults, such as a template naming an unknown token, only show on use.
            tokenizer.decode(tokenizer.encode("a"))
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text; see `contracts.TokenizerLike.encode`."""
        with self._encoding(text, parse_special):
            return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        """Token ids of text with special tokens; see `contracts.TokenizerLike.encode_between`."""
        with self._encoding("".join(parts), parse_special=False):
            if self._stands is None:
                self._stands = MarkStands(self._backend, partial(_ids, self._backend, add_special_tokens=False))
            return self._stands.encode(parts)

    @contextmanager
    def _encoding(self, text: str, parse_special: bool) -> Iterator[None]:
        """Where the library turns this text into tokens.

        Raises:
            PromptError, TokenizerError, BudgetError: as `encode`.
        """
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise PromptError(
                    f"The text is not valid Unicode: lone surrogate at index {error.start}.",
                    "Decode the input as UTF-8.",
                ) from error
        require_room("Turning the text into tokens", encoding_bytes(len(text)))
        with self._lock, allocating("The text"), _library_errors("The tokenizer failed to encode"):
            self._backend.encode_special_tokens = not parse_special
            try:
                yield
            finally:
                self._backend.encode_special_tokens = False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the vocabulary lacks add nothing. Waits for nobody who encodes a long text,
        as does nothing else that only looks."""
        ids = ids if self._stands is None else [id_ for id_ in ids if id_ not in self._stands.ids]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def rest(self) -> None:
        """Changes nothing: the tokenizer stays."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may have more columns."""
        return self._size

    def spellings(self) -> Iterator[str | None]:
        """The vocabulary's spelling of every id from 0 on, None for ids that are no token."""
        stands = self._stands.ids if self._stands is not None else ()
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        last = max((id_ for id_ in ids if id_ not in stands), default=-1)
        del ids  # the whole vocabulary, which would stay beside what is made of its spellings
        yield from (None if id_ in stands else self._backend.id_to_token(id_) for id_ in range(last + 1))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens marked as special."""
        return frozenset(id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def control_texts(self) -> Mapping[str, int]:
        """Texts that `encode` makes a token of only where special tokens are parsed, with that token's id."""
        added = self._backend.get_added_tokens_decoder()
        # Some are spelled in another way in normalized text.
        spelled = {self.id_to_token(id_) or "": id_ for id_ in self.special_ids}
        return spelled | {token.content: id_ for id_, token in added.items() if token.special}

    def token_to_id(self, text: str) -> int | None:
        """The id of one token as the vocabulary spells it, None where it has no such token."""
        return self._backend.token_to_id(text)

    def id_to_token(self, id_: int) -> str | None:
        """The vocabulary's spelling of an id, None where it has no such id."""
        if self._stands is not None and id_ in self._stands.ids:
            return None
        return self._backend.id_to_token(id_)

    @cached_property
    def decoder_types(self) -> tuple[str, ...]:
        """Names of the decoding steps in order, such as ("ByteLevel",); empty where tokens are joined by spaces."""
        decoder = self._backend.decoder
        return tuple(_step_types(json.loads(decoder.__getstate__()))) if decoder is not None else ()


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """A long text's are made without holding the interpreter, which the library does for several texts only."""
    if len(text) <= _SHORT:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _parsed(contents: bytes) -> tokenizers.Tokenizer:
    # The library, as all programs in its language, ends the process where memory is refused. Entries are counted
    # roughly: other objects' keys, and tokens with this text in them, are few.
    needed = parsing_bytes(len(contents), contents.count(b'":'), pairs=has_pairs(contents))
    require_room("Parsing the tokenizer", needed)
    return tokenizers.Tokenizer.from_buffer(contents)


def _bound_cache(backend: tokenizers.Tokenizer) -> None:
    """Keeps no more words than planned, where the library lets us say so."""
    resize = getattr(backend.model, "_resize_cache", None)
    if resize is not None:
        resize(SEEN_WORDS)


def _step_types(decoder: dict[str, Any]) -> Iterator[str]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _step_types(step)
    else:
        yield decoder["type"]


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
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
