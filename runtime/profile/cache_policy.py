"""Which policy for full contexts was measured to lose least of a model's texts, kept for this user."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
from pathlib import Path
from typing import Any

from edgeinfer.bundle import Bundle, write_file
from edgeinfer.bundle.writing import storage_errors
from edgeinfer.config import OVERFLOWS, LoadConfig
from edgeinfer.errors import StorageError, UsageError
from edgeinfer.records import dataclass
from edgeinfer.user_folders import make_private, user_cache

__all__ = ["AUTO", "MeasuredPolicy", "forget_policy", "keep_policy", "kept_policy", "with_measured_policy"]

# What LoadConfig.overflow says to take what was measured.
AUTO = "auto"
# Where nothing was.
_UNMEASURED = "window"
_FORMAT = 1
# A file is three numbers and a name.
_MOST_BYTES = 4096
_log = logging.getLogger("edgeinfer")


@dataclass(frozen=True)
class MeasuredPolicy:
    """What making room costs a model.

    Attributes:
        policy: that loses least, one of config.OVERFLOWS.
        tokens: of the text that told it.
        text, copying, needles: nats per token above those of a context that holds all of the text, mean over contexts.

    Raises:
        UsageError: a value is impossible.
    """

    policy: str
    tokens: int
    text: float
    copying: float
    needles: float

    def __post_init__(self) -> None:
        if self.policy not in OVERFLOWS or self.policy in (AUTO, "stop"):
            raise UsageError(f"A measured policy of {self.policy!r} is not known.", "Run edgeinfer tune --cache again.")
        losses = (self.text, self.copying, self.needles)
        if not isinstance(self.tokens, int) or not all(isinstance(x, float) and math.isfinite(x) for x in losses):
            raise UsageError("What a policy loses must be a number.", "Run edgeinfer tune --cache again.")


def with_measured_policy(config: LoadConfig, bundle: Bundle) -> LoadConfig:
    """The same with the policy that was measured to lose least in the place of "auto"; window where nothing was."""
    if config.overflow != AUTO:
        return config
    measured = kept_policy(bundle)
    chosen: dict[str, Any] = {"overflow": _UNMEASURED if measured is None else measured.policy}
    return dataclasses.replace(config, **chosen)


def kept_policy(bundle: Bundle) -> MeasuredPolicy | None:
    """What was kept for a model; None where nothing was. What is damaged is dropped, with a notice."""
    try:
        path = _file(bundle)
        if not path.is_file():
            return None
    except (StorageError, OSError):
        return None
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise StorageError("it is too large")
        data = json.loads(path.read_text("utf-8"))
        names = {"format", *(field.name for field in dataclasses.fields(MeasuredPolicy))}
        if not isinstance(data, dict) or set(data) != names or data.pop("format") != _FORMAT:
            raise StorageError("its fields are not as expected")
        return MeasuredPolicy(**data)
    # RecursionError: what a deeply nested file makes json raise. TypeError: what unhashable names do.
    except (StorageError, UsageError, OSError, ValueError, TypeError, RecursionError) as error:
        _log.warning("%s cannot be read and is discarded: %s.", path, str(error).rstrip("."))
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def keep_policy(bundle: Bundle, measured: MeasuredPolicy) -> Path:
    """Keeps what was measured of a model for this user's next loads, in the place of an earlier result; where.

    Raises:
        StorageError: it cannot be kept.
    """
    path = _file(bundle)
    data: dict[str, Any] = {"format": _FORMAT} | dataclasses.asdict(measured)
    with storage_errors(path.parent):
        make_private(path.parent)
    write_file(path, json.dumps(data, indent=1).encode() + b"\n")
    return path


def forget_policy(bundle: Bundle) -> bool:
    """Drops what was kept for a model; whether there was anything.

    Raises:
        StorageError: it cannot be dropped, or this user has no home folder.
    """
    path = _file(bundle)
    with storage_errors(path.parent):
        there = path.is_file()
        path.unlink(missing_ok=True)
    return there


def _file(bundle: Bundle) -> Path:
    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
    key = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return user_cache() / "edgeinfer" / "cache-policies" / f"{key}.json"
