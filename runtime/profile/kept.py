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
from edgeinfer.bundle.strict_json import MisfitError, read_whole
from edgeinfer.bundle.writing import storage_errors, write_file
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options.load import OVERFLOWS, LoadOptions
from edgeinfer.core.records import dataclass
from edgeinfer.core.user_files import make_private, user_cache, written

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Measured = TypeVar("Measured", bound=DataclassInstance)
else:
    Measured = TypeVar("Measured")

_FORMAT = 1
# A file is a kilobyte; affinities of a thousand threads are ten.
_MOST_BYTES = 1 << 16
_MOST_KEPT = 256
_log = logging.getLogger("edgeinfer")


class KeptFiles(Generic[Measured]):
    """Files of one kind: a dataclass that refuses impossible values with a UsageError."""

    def __init__(self, kind: type[Measured], folder: str) -> None:
        self._kind, self._folder = kind, folder

    def path(self, model: str) -> Path:
        """Where a model's file belongs, by the model's digest; it need not exist."""
        return user_cache() / "edgeinfer" / self._folder / f"{model}.json"

    def read(self, path: Path) -> Measured:
        """UsageError where there is none, or anything in it is unknown, missing or impossible."""
        try:
            if not path.is_file():
                raise UsageError(f"{path} is not a file.")
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
        if len(data) > _MOST_BYTES:
            raise UsageError(f"{path} is too large for a profile.")
        wrong = f"{path} is not an edgeinfer profile"
        try:
            fields = json.loads(data.decode("utf-8"))
            if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
                raise UsageError(f"{wrong}: It has another format.")
            return read_whole(self._kind, fields)
        except UsageError as error:
            raise UsageError(error.message if str(path) in error.message else f"{wrong}: {error.message}") from error
        except MisfitError as misfit:
            raise UsageError(f"{wrong}: Its fields are not as expected: {str(misfit)[:80]}.") from misfit
        # What damage makes json raise; RecursionError of a deeply nested file.
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{wrong}.") from error

    def write(self, measured: Measured, path: Path) -> None:
        """Writes a file, whole or not at all."""
        data: dict[str, Any] = {"format": _FORMAT} | dataclasses.asdict(measured)
        write_file(path, json.dumps(data, indent=1).encode() + b"\n")

    def keep(self, model: str, measured: Measured) -> Path:
        """Write a model's file for this user's next loads; return its path."""
        path = self.path(model)
        with storage_errors(path.parent):
            make_private(path.parent)
            others = [each for each in path.parent.glob("*.json") if each != path]
            # Those that were written longest ago.
            for old in sorted(others, key=written)[: max(0, len(others) + 1 - _MOST_KEPT)]:
                old.unlink(missing_ok=True)
        self.write(measured, path)
        return path

    def forget(self, model: str) -> bool:
        """Remove a model's file; return whether there was one."""
        path = self.path(model)
        with storage_errors(path):
            there = path.is_file()
            path.unlink(missing_ok=True)
        return there


def files_digest(bundle: Bundle, *how: object) -> str:
    """Digest of a bundle's files, and of how it runs."""
    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
    key = json.dumps([files, *how] if how else files, sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()


# What LoadOptions.overflow says to take what was measured.
AUTO = "auto"
# Where nothing was.
_UNMEASURED = "window"
# Backends whose caches lose rows, and are not edited.
_ONLY_WINDOW = ("llamacpp",)


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


KEPT_POLICIES = KeptFiles(MeasuredPolicy, "cache-policies")


def measured_policy(bundle: Bundle) -> MeasuredPolicy | None:
    """What was measured of a model; None where nothing was. A damaged file is dropped with a warning."""
    try:
        path = KEPT_POLICIES.path(files_digest(bundle))
        return KEPT_POLICIES.read(path) if path.is_file() else None
    except (StorageError, OSError):
        return None
    except UsageError as error:
        _log.warning("%s It is discarded.", error.message)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def with_measured_policy(config: LoadOptions, bundle: Bundle, backend: str) -> LoadOptions:
    """Replace "auto" by the policy that was measured to lose least, or window, which every backend's cache has."""
    if config.overflow != AUTO:
        return config
    measured = None if backend in _ONLY_WINDOW else measured_policy(bundle)
    chosen: dict[str, Any] = {"overflow": _UNMEASURED if measured is None else measured.policy}
    return dataclasses.replace(config, **chosen)
