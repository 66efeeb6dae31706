"""Texts to calibrate with, and to compare with what calibrating made: tokens of a file, or of the text that ships."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.writing import digest_of
from edgeinfer.core.errors import CheckpointError, UsageError

# Tokens of a text that the model reads at a time: attention costs little at this length, and most contexts are there.
LENGTH = 512
# A longer file is looked at in so many pieces, of this size together.
_MOST_BYTES = 4 << 20
_PIECES = 256
# What a calibration is called that reads the text of this package.
DEFAULT_TEXT = "default"
# Its pieces, whose kinds take turns, so that any few in a row are of all kinds.
_BETWEEN = "\n\f\n"
# A shorter rest of a piece says little, as its first tokens have seen nothing.
_LEAST = 64

Part = Literal["calibrate", "held_out"]


@dataclass(frozen=True)
class CalibrationText:
    texts: tuple[NDArray[np.int64], ...]  # token ids of each
    sha256: str  # of the file

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def builtin_text(part: Part = "calibrate") -> tuple[str, ...]:
    """Prose, dialogues, code and several languages in pieces of about 500 tokens; the parts have nothing in common."""
    return tuple(_shipped(part).decode("utf-8").removesuffix("\n").split(_BETWEEN))


def _shipped(part: Part) -> bytes:
    return importlib.resources.files("edgeinfer.export.source").joinpath("calibration", f"{part}.txt").read_bytes()


def read_builtin_text(part: Part, tokenizer: bytes, tokens: int, context: int) -> CalibrationText:
    """So many tokens of the text that ships, or all that it has, and its digest."""
    encode, begin = _encoder(tokenizer)
    body = min(LENGTH, context, tokens) - len(begin)
    pieces = [encode(piece) for piece in builtin_text(part)] if body > 0 else []
    texts: list[NDArray[np.int64]] = []
    for ids in _chunks(pieces, body):
        left = tokens - sum(map(len, texts))
        texts.append(np.concatenate([begin, ids])[:left])
        if left <= len(texts[-1]):
            break
    if not texts:
        message = "The checkpoint's tokenizer knows next to nothing of the text that this program calibrates with."
        raise UsageError(message, "Give another with --calibration FILE, or add --no-calibration.")
    return CalibrationText(tuple(texts), hashlib.sha256(_shipped(part)).hexdigest())


def _chunks(pieces: list[NDArray[np.int64]], body: int) -> Iterator[NDArray[np.int64]]:
    """The beginning of every piece, then what follows it in each."""
    longest = max(map(len, pieces), default=0)
    for start in range(0, longest, max(body, 1)):
        for ids in pieces:
            if len(ids) >= start + min(_LEAST, body):
                yield ids[start : start + body]


def read_calibration_text(source: Path | str, tokenizer: bytes, tokens: int, context: int) -> CalibrationText:
    """So many tokens of a file, or with "default" of the text that ships."""
    if source == DEFAULT_TEXT:
        return read_builtin_text("calibrate", tokenizer, tokens, context)
    path = Path(source)
    encode, begin = _encoder(tokenizer)
    ids = encode(_sample(path))
    length = min(LENGTH, context, tokens)
    body, count = length - len(begin), -(-tokens // length)
    needed = tokens - count * len(begin)
    if len(ids) < needed or body < 1:
        message = f"{path} has {len(ids)} tokens, and {tokens} are needed for calibration."
        raise UsageError(message, "Give a longer text, or ask for fewer with --calibration-tokens.")
    # The last is what the others leave, so that as many tokens are enough as are asked for; texts do not overlap.
    sizes = [body] * (count - 1) + [needed - (count - 1) * body]
    starts = np.linspace(0, len(ids) - sizes[-1], count).astype(np.int64)
    texts = [np.concatenate([begin, ids[start : start + size]]) for start, size in zip(starts, sizes, strict=True)]
    return CalibrationText(tuple(texts), digest_of(path))


def _sample(path: Path) -> str:
    """The text of a file, or pieces spread over a long one."""
    try:
        size = path.stat().st_size
        if size <= _MOST_BYTES:
            return path.read_bytes().decode("utf-8")
        length, pieces = _MOST_BYTES // _PIECES, []
        with path.open("rb") as file:
            for index in range(_PIECES):
                file.seek(index * (size - length) // (_PIECES - 1))
                piece = file.read(length)
                # From the first line that begins in it, so that no character is cut.
                pieces.append(piece[piece.find(b"\n") + 1 : piece.rfind(b"\n") + 1])
        return b"".join(pieces).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Save it as UTF-8.") from error
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Check the name and its permissions.") from error


def _encoder(tokenizer: bytes) -> tuple[Callable[[str], NDArray[np.int64]], NDArray[np.int64]]:
    """What gives the token ids of a text, and those that begin one."""
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_buffer(tokenizer)
        encoder.encode_special_tokens = True  # as the text that they are, where a file spells some
        begin = np.asarray(encoder.encode("").ids, np.int64)
    except Exception as error:  # the library raises plain Exception
        message = f"The checkpoint's tokenizer cannot be used: {error}."
        raise CheckpointError(message, "Download the checkpoint again.") from error
    return lambda text: np.asarray(encoder.encode(text, add_special_tokens=False).ids, np.int64), begin
