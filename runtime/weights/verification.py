"""Compares the files of bundles with their digests while their contents are loaded, and notes which were found whole.

Small files are read every time. A note says what a large file was when it was found whole, and the file is read again
when that has changed. A plain GGUF file comes without a digest, unless it lies in a hub's cache under it: the digest
that it had when it was first used takes its place. Each note is a small file in the user's cache, so that processes
need not wait for each other. It may be removed at any time; a damaged note, or one of another file, counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import FileIdentity, hash_file, published_digest, write_file
from edgeinfer.core.errors import BundleError, EdgeInferError, InternalError, StorageError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.user_files import make_private, user_cache, written
from edgeinfer.runtime.system.memory import has_room

_log = logging.getLogger("edgeinfer")

_FORMAT = 1
_MOST_NOTES = 512
# The longest path takes 4,096 bytes, six characters each where they are no letters.
_MOST_BYTES = 32_768
# Writing again within this time may leave the times of a file as they are: some file systems' clocks are so coarse.
_COARSE_NS = 2_000_000_000


@dataclass(frozen=True)
class Note:
    """A file's identity when it was found whole."""

    path: str
    sha256: str
    identity: FileIdentity
    # The file had not been written for so long that another change would show; otherwise it is read again.
    stable: bool = True

    def to_json(self) -> str:
        data = {"format": _FORMAT, **asdict(self)}
        return json.dumps(data | {"check": _check(data)}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Note:
        """Reads a note; whatever it raises says that it is damaged."""
        data: dict[str, Any] = json.loads(text)
        if data.pop("check") != _check(data) or data.pop("format") != _FORMAT:
            raise ValueError("not a note")
        return cls(**data | {"identity": FileIdentity(**data["identity"])})


class VerifiedFiles:
    """The notes, which it also writes where it `keeps` them."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps

    def find(self, path: Path) -> Note | None:
        """The note of a file; None where there is none."""
        try:
            place = _place(path)
            with place.open("rb") as file:
                note = Note.from_json(file.read(_MOST_BYTES).decode())
            return note if note.path == _name(path) else None
        except FileNotFoundError:
            return None
        # What damage makes the parser raise is many things, and none of it may keep a model from loading.
        except Exception as error:
            _log.info("The note on %s cannot be used: %s.", path, str(error) or type(error).__name__)
            return None

    def keep(self, path: Path, sha256: str, identity: FileIdentity) -> None:
        """Notes what a file was when its digest was found to be right."""
        if not self._keeps:
            return
        latest = max(identity.modified_ns, identity.changed_ns)
        note = Note(_name(path), sha256, identity, stable=time.time_ns() - latest > _COARSE_NS)
        if self.find(path) == note:
            return
        try:
            place = _place(path)
            make_private(place.parent)
            if not place.exists():
                _make_room(place.parent)
            write_file(place, note.to_json().encode())
        except (OSError, StorageError) as error:
            _log.info("%s is verified again at the next load: %s", path, error)


def _place(path: Path) -> Path:
    name = hashlib.sha256(_name(path).encode("utf-8", "surrogateescape")).hexdigest()
    return user_cache() / "edgeinfer" / "verified" / f"{name[:32]}.json"


def _name(path: Path) -> str:
    return str(path.resolve())


def _check(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _make_room(folder: Path) -> None:
    """Remove the oldest notes, and leftovers of killed processes, until there is room for one more."""
    notes = sorted(folder.iterdir(), key=written)
    for old in notes[: max(0, len(notes) + 1 - _MOST_NOTES)]:
        with contextlib.suppress(OSError):
            old.unlink()


# Up to this size files are read at every load: it takes some 10 to 40 ms.
SMALL_BYTES = 16_000_000
# Seconds in which a reply that is cancelled while it waits ends.
_PATIENCE = 0.05
# Of addresses, for a thread: its stack, and the heap that the C library reserves for it.
_THREAD_BYTES = 160 * 1024**2

# "first": taken as the right one now. "before": a large file is what it was when it was found whole.
Outcome = Literal["now", "before", "first"]


@dataclass(frozen=True)
class FileCheck:
    """A file and its expected content."""

    path: Path
    name: str
    bytes: int
    sha256: str | None  # None where it is not known
    plain: bool = False  # the file is a model by itself, without a manifest
    tail: int = 0  # bytes behind all that the file says it holds

    @property
    def small(self) -> bool:
        return self.bytes <= SMALL_BYTES


def files_of(bundles: Sequence[Bundle]) -> tuple[FileCheck, ...]:
    """All files of some bundles, each once, the smallest first."""
    found = {check.path.resolve(): check for bundle in bundles for check in _checks(bundle)}
    return tuple(sorted(found.values(), key=lambda check: check.bytes))


def _checks(bundle: Bundle) -> Iterator[FileCheck]:
    if bundle.digests:
        for name, entry in bundle.manifest.files.items():
            yield FileCheck(bundle.path / name, name, entry.bytes, entry.sha256)
        return
    for split in bundle.gguf.splits:
        end = max((tensor.offset + tensor.nbytes for tensor in split.tensors), default=split.data_offset)
        tail = max(0, split.size - -(-end // split.alignment) * split.alignment)
        digest = published_digest(split.path)
        yield FileCheck(split.path, split.path.name, split.size, digest, plain=True, tail=tail)


class _StoppedError(Exception):
    """Reading was stopped."""


def check_file(
    check: FileCheck,
    notes: VerifiedFiles,
    identity: FileIdentity | None = None,
    *,
    stopped: Callable[[], bool] = lambda: False,
    again: bool = False,
) -> Outcome:
    """Compares a file with its digest, or (unless `again`) with its identity when it was last found whole."""
    with _reading(check.path):
        now = identity or FileIdentity.of(check.path)
        if now.size != check.bytes:
            raise BundleError(f"{check.name} has {now.size} bytes, not {check.bytes}.", _again(check))
        note = None if check.small and check.sha256 else notes.find(check.path)
        wanted = check.sha256
        if wanted is None and note is not None and (note.identity.size == now.size or check.tail):
            wanted = note.sha256
        unread = not (check.small or again) and note is not None and note.stable
        if unread and note is not None and (note.identity, note.sha256) == (now, wanted):
            return "before"
        digest, opened = _hash(check.path, stopped)
        if opened != now:
            raise _changed(check)
        if wanted is not None and digest != wanted:
            raise _damaged(check)
        if not check.small or check.sha256 is None:
            notes.keep(check.path, digest, opened)
        return "first" if wanted is None else "now"


def accept_file(check: FileCheck, notes: VerifiedFiles) -> Outcome:
    """Takes a file without a digest as the right one from now on."""
    with _reading(check.path):
        notes.keep(check.path, *_hash(check.path, lambda: False))
        return "first"


def _hash(path: Path, stopped: Callable[[], bool]) -> tuple[str, FileIdentity]:
    hashed = hash_file(path, stopped)
    if hashed is None:
        raise _StoppedError
    return hashed


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "Check the file and its permissions."
        raise BundleError(f"Cannot read {path}: {error.strerror}.", hint) from error


def _changed(check: FileCheck) -> BundleError:
    return BundleError(f"{check.path} was changed while it was loaded.", "Load the model again.")


def _damaged(check: FileCheck) -> BundleError:
    if not check.plain:
        return BundleError(f"{check.name} does not match its sha256 in the manifest.", _again(check))
    if check.sha256 is not None:
        return BundleError(f"{check.path} does not match the sha256 that it was published with.", _again(check))
    message = f"{check.path} is not the file that was first used here: its sha256 differs."
    hint = f"Download it again; if you replaced it on purpose: edgeinfer inspect {check.path} --accept"
    return BundleError(message, hint)


def _again(check: FileCheck) -> str:
    target = check.path.resolve()
    if target.parent.name == "blobs":
        return f"Remove {target} and pull the model again."
    return "Download it again." if check.plain else "Export or download the bundle again."


class Verification:
    """A check of all files of some bundles, which runs by itself from the beginning."""

    def __init__(self, bundles: Sequence[Bundle], *, keeps: bool = True) -> None:
        self._files = files_of(bundles)
        self._identities = {check: _identity(check.path) for check in self._files}
        self._notes = VerifiedFiles(keeps=keeps)
        self._stopped, self._small_done, self._done = threading.Event(), threading.Event(), threading.Event()
        self._error: EdgeInferError | None = None
        self._outcomes: list[Outcome] = []
        thread = threading.Thread(target=self._run, name="edgeinfer-verification", daemon=True)
        try:
            if not has_room(_THREAD_BYTES):
                raise RuntimeError("no room for a thread")
            thread.start()
        except RuntimeError:
            self._run()

    @property
    def passed(self) -> bool:
        return self._done.is_set() and self._error is None and not self._stopped.is_set()

    @property
    def outcome(self) -> str:
        """When the files were verified: an `Outcome`, "pending", or "failed"."""
        if not self.passed:
            return "failed" if self._error is not None else "pending"
        large = [each for each, check in zip(self._outcomes, self._files, strict=True) if not check.small]
        for word in ("first", "now", "before"):
            if word in self._outcomes if word == "first" else word in large:
                return word
        return "now"

    def finish(self) -> None:
        """Waits for the small files, and looks whether any file was changed or replaced since the beginning."""
        self._small_done.wait()
        self._raise()
        for check, identity in self._identities.items():
            if _identity(check.path) != identity:
                raise _changed(check)

    def require(self) -> None:
        self._done.wait()
        self._raise()
        if self._stopped.is_set():
            raise UsageError("The model is closed.", "Load it again.")

    def await_verdict(self, cancelled: Callable[[], bool]) -> float | None:
        """Milliseconds that `require` waited, whose errors it raises; None where it was cancelled first."""
        started = time.perf_counter()
        while not self._done.wait(_PATIENCE):
            if cancelled():
                return None
        self.require()
        return (time.perf_counter() - started) * 1e3

    def stop(self) -> None:
        if not self._done.is_set():
            self._stopped.set()

    def _raise(self) -> None:
        if self._error is not None:
            # A new one each time: several threads may raise it, and each adds its own traceback.
            raise type(self._error)(self._error.message, self._error.hint) from self._error

    def _run(self) -> None:
        try:
            for check in self._files:
                if not check.small:
                    self._small_done.set()
                found = check_file(check, self._notes, self._identities[check], stopped=self._stopped.is_set)
                self._outcomes.append(found)
        except _StoppedError:
            pass
        except EdgeInferError as error:
            self._error = error
        except Exception as error:
            self._error = InternalError(f"The model's files could not be verified: {error}.")
        finally:
            self._small_done.set()
            self._done.set()


def _identity(path: Path) -> FileIdentity | None:
    try:
        return FileIdentity.of(path)
    except OSError:
        return None
