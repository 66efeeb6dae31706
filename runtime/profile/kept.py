"""What is measured of a model and kept for this user's next loads: one small file for each model and kind."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.strict_json import read_whole
from edgeinfer.bundle.writing import storage_errors, write_file
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options.load import OVERFLOWS, LoadConfig
from edgeinfer.core.records import dataclass
from edgeinfer.core.user_files import make_private, user_cache

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Measured = TypeVar("Measured", bound=DataclassInstance)
else:
    Measured = TypeVar("Measured")


_FORMAT = 1
# A file is a few numbers and names.
_MOST_BYTES = 4096
_log = logging.getLogger("edgeinfer")


class KeptMeasurement(Generic[Measured]):
    """Reads, writes and drops measurements of one kind: a dataclass that refuses impossible values with a
    UsageError."""

    def __init__(self, kind: type[Measured], folder: str) -> None:
        self._kind, self._folder = kind, folder

    def read(self, bundle: Bundle) -> Measured | None:
        """Read a model's measurement; None if there is none. Damaged files are dropped with a warning."""
        try:
            path = self._file(bundle)
            if not path.is_file():
                return None
        except (StorageError, OSError):
            return None
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise StorageError("it is too large")
            data = json.loads(path.read_text("utf-8"))
            if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
                raise StorageError("it has another format")
            return read_whole(self._kind, data)
        # RecursionError: what a deeply nested file makes json raise.
        except (StorageError, UsageError, OSError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be read and is discarded: %s.", path, str(error).rstrip("."))
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def keep(self, bundle: Bundle, measured: Measured) -> Path:
        """Keep a model's measurement; return its path."""
        path = self._file(bundle)
        data: dict[str, Any] = {"format": _FORMAT} | dataclasses.asdict(measured)
        with storage_errors(path.parent):
            make_private(path.parent)
        write_file(path, json.dumps(data, indent=1).encode() + b"\n")
        return path

    def forget(self, bundle: Bundle) -> bool:
        """Drop a model's measurement; return whether there was one."""
        path = self._file(bundle)
        with storage_errors(path.parent):
            there = path.is_file()
            path.unlink(missing_ok=True)
        return there

    def _file(self, bundle: Bundle) -> Path:
        files = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
        key = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        return user_cache() / "edgeinfer" / self._folder / f"{key}.json"


# What LoadConfig.overflow says to take what was measured.
AUTO = "auto"
# Where nothing was.
_UNMEASURED = "window"


@dataclass(frozen=True)
class MeasuredPolicy:
    """The policy that loses least, and its losses: nats per token above those of a context that holds all of the
    text."""

    policy: str
    tokens: int
    text: float
    copying: float
    needles: float

    def __post_init__(self) -> None:
        if self.policy not in OVERFLOWS or self.policy in (AUTO, "stop"):
            raise UsageError(f"A measured policy of {self.policy!r} is not known.", "Run edgeinfer tune --cache again.")


KEPT_POLICY = KeptMeasurement(MeasuredPolicy, "cache-policies")


def with_measured_policy(config: LoadConfig, bundle: Bundle) -> LoadConfig:
    """Replace "auto" by the policy that was measured to lose least, or window."""
    if config.overflow != AUTO:
        return config
    measured = KEPT_POLICY.read(bundle)
    chosen: dict[str, Any] = {"overflow": _UNMEASURED if measured is None else measured.policy}
    return dataclasses.replace(config, **chosen)
