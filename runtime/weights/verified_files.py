"""Which files were found whole, and what they were then, in the user's cache.

Each has a small note of its own, so that processes need not wait for each other. A note may be removed at any time;
one that is damaged, or was written for another file, counts as none. Where the folder cannot be written, nothing is
remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeinfer.bundle.writing import FileIdentity, write_file
from edgeinfer.errors import StorageError
from edgeinfer.records import dataclass
from edgeinfer.user_files import make_private, user_cache, written

_log = logging.getLogger("edgeinfer")

_FORMAT = 1
_MOST_NOTES = 512
# The longest path takes 4,096 bytes, six characters each where they are no letters.
_MOST_BYTES = 32_768
# Writing again within this time may leave the times of a file as they are: those of some file systems are so coarse.
_COARSE_NS = 2_000_000_000


@dataclass(frozen=True)
class Note:
    """What a file was when it was found whole.

    Attributes:
        stable: it had been left alone for so long that another change would show; otherwise it is read again.
    """

    path: str
    sha256: str
    identity: FileIdentity
    stable: bool = True

    def to_json(self) -> str:
        data = {"format": _FORMAT, **asdict(self)}
        data["settled"] = data.pop("stable")
        return json.dumps(data | {"check": _check(data)}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Note:
        """Reads a note; whatever it raises says that it is damaged."""
        data: dict[str, Any] = json.loads(text)
        if data.pop("check") != _check(data) or data.pop("format") != _FORMAT:
            raise ValueError("not a note")
        data["stable"] = data.pop("settled")
        return cls(**data | {"identity": FileIdentity(**data["identity"])})


class VerifiedFiles:
    """The notes.

    Args:
        keeps: also writes them, else only reads.
    """

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
    """Removes the oldest notes, and what killed processes left of theirs, until there is room for one more."""
    notes = sorted(folder.iterdir(), key=written)
    for old in notes[: max(0, len(notes) + 1 - _MOST_NOTES)]:
        with contextlib.suppress(OSError):
            old.unlink()
