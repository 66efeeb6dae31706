"""The user's settings in a JSON file, replaced atomically, and the app's data folder."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from edgeinfer.apps.desktop.checks import DiskFullError, check_name, check_text
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options import options_of, parse_size
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.user_files import user_data

# Generation options in the window.
OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "max_tokens", "speculation", "when_full", "tools"),
)
# What to do when the context is full; not the model's `overflow`, which drops tokens.
WHEN_FULL = ("stop", "leave_out_oldest")
# Whether tools of MCP servers are offered to the model.
TOOLS = ("on", "off")
# The most likely reply tends to repeat itself, above all with small models.
CONVERSATIONAL: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9}
THEMES = ("light", "dark", "system")
_MOST_RECENT = 20
_LONGEST_SYSTEM = 100_000


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check generation options; None removes one."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if name not in OPTIONS:
            raise UsageError(f"Unknown option {name!r}.", f"Known options: {', '.join(OPTIONS)}.")
    when_full = given.get("when_full", WHEN_FULL[0])
    _require(when_full in WHEN_FULL, "when_full", f"one of {', '.join(WHEN_FULL)}")
    _require(given.get("tools", TOOLS[0]) in TOOLS, "tools", f"one of {', '.join(TOOLS)}")
    ReplyOptions.of(**{name: value for name, value in given.items() if name not in ("when_full", "tools")})
    return given


@dataclass(frozen=True)
class AppSettings:
    """The user's settings; None leaves a choice to edgeinfer."""

    theme: str | None = None  # one of THEMES
    memory: int | None = None  # budget of the process in bytes
    context: int | None = None  # in tokens
    model: str | None = None  # last used, path or hub id; None is the built-in model
    system: str = ""  # system message of new conversations
    options: Mapping[str, Any] = field(default_factory=dict)  # default generation options of all conversations
    recent: tuple[str, ...] = ()  # models used, latest first
    unfinished: tuple[str, ...] = ()  # models whose download has not finished

    def __post_init__(self) -> None:
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_size(self.memory))
        _require(self.theme is None or self.theme in THEMES, "theme", f"one of {', '.join(THEMES)}, or null")
        context = options_of(LoadOptions)["context"].range
        _require(context is not None and context.holds(self.context), "context", f"{context}, or null")
        _require(self.model is None or (isinstance(self.model, str) and bool(self.model)), "model", "a string, or null")
        check_name(self.model or "", "model")
        text = isinstance(self.system, str) and len(self.system) <= _LONGEST_SYSTEM
        _require(text, "system", f"a string of at most {_LONGEST_SYSTEM:,} characters")
        check_text(self.system, "system")
        _require(isinstance(self.options, Mapping), "options", "an object")
        object.__setattr__(self, "options", checked_options(self.options))
        for name in ("recent", "unfinished"):
            listed = getattr(self, name)
            _require(isinstance(listed, list | tuple) and all(isinstance(m, str) for m in listed), name, "texts")
            for model in listed:
                check_name(model, name)
            object.__setattr__(self, name, tuple(listed)[:_MOST_RECENT])

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a changed copy; options are merged, and None removes one."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise UsageError(f"Unknown setting {name!r}.", f"Known settings: {', '.join(sorted(known))}.")
        given = dict(changes)
        if isinstance(given.get("options"), Mapping):
            given["options"] = {**self.options, **given["options"]}
        return dataclasses.replace(self, **given)

    def used(self, model: str | None, *, default: bool = True) -> Self:
        """Return a copy with this model as the latest and, if `default`, the default one."""
        others = tuple(other for other in self.recent if other != model)
        recent = others if model is None else (model, *others)
        return dataclasses.replace(self, model=model if default else self.model, recent=recent)


class SettingsFile:
    """Settings and their file; those for now are of this run only, saved only if they are set again."""

    def __init__(self, path: Path, for_now: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.put_aside: Path | None = None  # where an unreadable file was moved; None if there was none
        self._kept = self._read()
        self.now = self._kept.changed(for_now or {})  # the settings in force

    def change(self, changes: Mapping[str, Any]) -> AppSettings:
        """Change and save settings."""
        return self._apply(lambda settings: settings.changed(changes))

    def used(self, model: str | None, *, default: bool = True) -> None:
        """Save which model was used last, and whether it is the default one."""
        self._apply(lambda settings: settings.used(model, default=default))

    def keep(self, *, unfinished: tuple[str, ...]) -> None:
        """Save which downloads are unfinished."""
        self._apply(lambda settings: dataclasses.replace(settings, unfinished=unfinished))

    def _apply(self, change: Callable[[AppSettings], AppSettings]) -> AppSettings:
        with self._lock:
            now, kept = change(self.now), change(self._kept)
            self._write(kept)
            self.now, self._kept = now, kept
        return now

    def _read(self) -> AppSettings:
        try:
            data = json.loads(self._path.read_text("utf-8"))
            _require(isinstance(data, dict), "settings", "an object")
            return AppSettings().changed(data)
        except FileNotFoundError:
            return AppSettings()
        except OSError as error:
            raise StorageError(f"{self._path} cannot be read: {error.strerror}.", "Check its permissions.") from error
        except (ValueError, RecursionError, UsageError):
            stamp = time.strftime("%Y%m%d-%H%M%S")
            self.put_aside = self._path.with_name(f"{self._path.stem}.damaged-{stamp}{self._path.suffix}")
            self._path.replace(self.put_aside)
            return AppSettings()

    def _write(self, settings: AppSettings) -> None:
        text = json.dumps(dataclasses.asdict(settings), ensure_ascii=False, indent=1) + "\n"
        hint = "Free some space, check its permissions, or name another folder with --data."
        temporary = None
        try:
            # mkstemp makes files that only this user can read.
            handle, temporary = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self._path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
            raise kind(f"{self._path} cannot be written: {error.strerror}.", hint) from error


def _require(condition: bool, name: str, rule: str) -> None:
    if not condition:
        raise UsageError(f"{name} is out of range.", f"{name} must be {rule}.")


@dataclass(frozen=True)
class DataFolder:
    """The paths in a data folder."""

    path: Path

    @property
    def history(self) -> Path:
        return self.path / "history.sqlite3"

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def mcp(self) -> Path:
        """The servers whose tools the model may call; it need not exist."""
        return self.path / "mcp.json"

    @property
    def models(self) -> Path:
        """A folder for bundles and GGUF files; it need not exist."""
        return self.path / "models"

    def make(self) -> None:
        """Create the folder, for this user only."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            hint = "Name another folder with --data."
            raise StorageError(f"{self.path} cannot be made: {error.strerror}.", hint) from error


def data_folder() -> DataFolder:
    """The user's data folder of the app; it need not exist."""
    return DataFolder(user_data() / "edgeinfer")
