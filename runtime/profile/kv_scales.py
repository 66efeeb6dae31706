"""The static scales of an older bundle's quantized caches, wherever they are: in the bundle, or kept for this user.

`edgeinfer tune` once found scales for bundles without, and kept them in the user's cache, by the digest of the weights;
they are read as strictly as a bundle's own. Paged caches need none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from pathlib import Path

from edgeinfer.bundle import WEIGHTS, Bundle, KVScales
from edgeinfer.bundle.kv_scales import most_bytes, read_kv_scales
from edgeinfer.errors import EdgeInferError, StorageError
from edgeinfer.user_folders import user_cache

__all__ = ["kept_kv_scales_file", "kv_scales"]

_log = logging.getLogger("edgeinfer")


def kv_scales(bundle: Bundle) -> KVScales | None:
    """The bundle's own scales, else those kept for this user; None where there are neither.

    What was kept and is damaged is dropped, with a notice.

    Raises:
        BundleError: the bundle's own are damaged.
    """
    return read_kv_scales(bundle) or _kept(bundle)


def kept_kv_scales_file(bundle: Bundle) -> Path:
    """Where scales for this bundle are kept; it need not exist.

    Raises:
        StorageError: this user has no home folder.
    """
    weights = bundle.manifest.files[WEIGHTS].sha256 if bundle.has(WEIGHTS) else ""
    key = hashlib.sha256(f"{weights} {bundle.manifest.geometry}".encode()).hexdigest()
    return user_cache() / "edgeinfer" / "kv-scales" / f"{key}.json"


def _kept(bundle: Bundle) -> KVScales | None:
    try:
        path = kept_kv_scales_file(bundle)
        if not path.is_file():
            return None
    except (StorageError, OSError):
        return None
    try:
        if path.stat().st_size > most_bytes(bundle.manifest.geometry):
            raise StorageError("it is too large")
        data = json.loads(path.read_text("utf-8"))
        return KVScales.from_dict(data if isinstance(data, dict) else {}, bundle.manifest.geometry)
    # RecursionError: what a deeply nested file makes json raise.
    except (EdgeInferError, OSError, ValueError, RecursionError) as error:
        _log.warning("%s cannot be read and is discarded: %s.", path, str(error).rstrip("."))
        with contextlib.suppress(OSError):
            path.unlink()
        return None
