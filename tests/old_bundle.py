"""A bundle as edgeinfer made them before caches were paged, and what it computed then.

`old_bundle.zip` holds `bundle/`, of format version 2: a random Qwen2 of two layers at 4 bits, the second with a window,
with graphs for float32, int8 and int4 caches in both layouts, scales of the latter, and a Qwen3 of one layer at 8 bits
as its drafter; and `logits.npz`: the logits of the last of twelve tokens and of four that follow. Of caches, only
float32 ones are still read.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FILE = Path(__file__).with_suffix(".zip")
# What the logits follow; each further token is the one of the largest logit.
TOKENS = np.arange(2, 14) * 7 % 320


def old_bundle(folder: Path) -> Path:
    """Unpacks the bundle into a folder that does not exist yet, and returns that."""
    with zipfile.ZipFile(_FILE) as archive:
        for name in archive.namelist():
            root, _, path = name.partition("/")
            if root == "bundle":
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(archive.read(name))
    return folder


def old_logits() -> NDArray[Any]:  # (5, 320)
    """What it computed with a float32 cache."""
    with zipfile.ZipFile(_FILE) as archive, np.load(io.BytesIO(archive.read("logits.npz"))) as arrays:
        floats: NDArray[Any] = arrays["float32"]
        return floats
