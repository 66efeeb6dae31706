"""Texts to calibrate with: tokens of a text file, from places spread over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.writing import digest_of
from edgeinfer.errors import CheckpointError, UsageError

# Tokens of a text that the model reads at a time: attention costs little at this length, and most contexts are there.
LENGTH = 512
# A longer file is looked at in so many pieces, of this size together.
_MOST_BYTES = 4 << 20
_PIECES = 256


@dataclass(frozen=True)
class CalibrationText:
    texts: tuple[NDArray[np.int64], ...]  # token ids of each
    sha256: str  # of the file

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def read_calibration_text(path: Path, tokenizer: bytes, tokens: int, context: int) -> CalibrationText:
    ids, begin = _tokenize(_sample(path), tokenizer)
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


def _tokenize(text: str, tokenizer: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids of a text, and those that begin one."""
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_buffer(tokenizer)
        encoder.encode_special_tokens = True  # as the text that they are, where a file spells some
        begin, ids = encoder.encode("").ids, encoder.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises plain Exception
        message = f"The checkpoint's tokenizer cannot be used: {error}."
        raise CheckpointError(message, "Download the checkpoint again.") from error
    return np.asarray(ids, np.int64), np.asarray(begin, np.int64)
