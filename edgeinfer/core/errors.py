"""The exceptions edgeinfer raises, the exit code of each, and how their messages name options and show values.

EdgeInferError
├── UserError                     something the caller can change
│   ├── UsageError           (2)  an argument, option or value
│   │   ├── PromptError      (2)  an empty, unreadable or malformed prompt
│   │   ├── ContextLengthError (2) more tokens than the context holds
│   │   ├── GrammarError     (2)  a schema, expression or grammar that no reply can follow
│   │   └── CapabilityError  (2)  an option that this model, or the engine that runs it, cannot follow
│   ├── ModelError           (3)  a checkpoint, bundle, tokenizer or template
│   │   ├── CheckpointError  (3)  files, tensors or config of a Hugging Face checkpoint
│   │   ├── UnsupportedArchitectureError (3)
│   │   ├── BundleError      (3)  manifest, hashes, paths or contents of a bundle
│   │   ├── AdapterError     (3)  an adapter that is damaged, of another kind, or not of the model
│   │   ├── TokenizerError   (3)
│   │   ├── TemplateError    (3)
│   │   └── HubError         (3)  a model that could not be fetched
│   ├── BudgetError          (4)  the plan does not fit the memory budget
│   ├── StorageError         (5)  a path that cannot be written, or a full disk
│   ├── DeviceError          (5)  a device that is not installed, fails, or cannot run the model
│   └── RemoteError          (5)  a server that cannot be reached, refuses, or has another model
└── InternalError            (5)  our fault, or the execution engine's
    ├── BackendError         (5)
    └── NativeUnavailableError (5) the native kernel cannot run here
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from edgeinfer.core.records import dataclass

_SHOWN = 80  # characters


@dataclass(frozen=True)
class Setting:
    """An option in a text, by its name in Python, and maybe a value: `"Use a larger " + Setting("context") + "."`."""

    name: str
    value: object = ...

    def __str__(self) -> str:
        return self.name if self.value is ... else f"{self.name}={shown(self.value)}"

    def __add__(self, other: str | Setting | Wording) -> Wording:
        return Wording((self,)) + other

    def __radd__(self, other: str) -> Wording:
        return Wording((other, self))


@dataclass(frozen=True)
class Wording:
    """A text that names options."""

    parts: tuple[str | Setting, ...]

    def __add__(self, other: str | Setting | Wording) -> Wording:
        return Wording((*self.parts, *(other.parts if isinstance(other, Wording) else (other,))))

    def __radd__(self, other: str) -> Wording:
        return Wording((other, *self.parts))

    def __str__(self) -> str:
        return said(self, str)


def joined(settings: Iterable[Setting], word: str) -> Wording:
    """Several options, with a word such as "and" between them."""
    text = Wording(())
    for index, each in enumerate(settings):
        text += each if index == 0 else f" {word} " + each
    return text


def one_of(values: Sequence[object]) -> str:
    """Several values to choose from, such as "2, 4 or 8"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def said(text: str | Wording, say: Callable[[Setting], str]) -> str:
    """A text with its options named by `say`."""
    if isinstance(text, str):
        return text
    return "".join(part if isinstance(part, str) else say(part) for part in text.parts)


def shown(value: object) -> str:
    """A value in the form of messages, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


class EdgeInferError(Exception):
    """Base of every error edgeinfer raises on purpose.

    Args:
        message: one line: what is wrong, with the value at fault. Options are named by `edgeinfer.core.errors.Setting`.
        hint: one line: what to do next. Shown after the message.
    """

    exit_code: ClassVar[int] = 5

    def __init__(self, message: str | Wording, hint: str | Wording = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self._wordings = (message, hint)
        self.message = str(message)
        self.hint = str(hint)

    def text(self, say: Callable[[Setting], str]) -> str:
        """The whole text with options named by `say`; `str` names them as in Python."""
        message, hint = (said(text, say) for text in self._wordings)
        return f"{message} {hint}".strip()


class UserError(EdgeInferError):
    """Something the caller can change."""


class UsageError(UserError):
    """A wrong argument, option or value."""

    exit_code = 2


class PromptError(UsageError):
    """An empty, unreadable or malformed prompt."""


class ContextLengthError(UsageError):
    """More tokens than the context holds, or a context larger than the model allows. `sizes` are the least tokens of
    the prompt, and the context's; None where it is not about a prompt."""

    def __init__(
        self, message: str | Wording, hint: str | Wording = "", *, sizes: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, hint)
        self.sizes = sizes


class GrammarError(UsageError):
    """A schema, regular expression or grammar that is wrong, unsupported or unsatisfiable."""


class CapabilityError(UsageError):
    """An option that this model, or the engine that runs it, cannot follow."""


class UnshareableError(UsageError):
    """A reply that needs what only one reply at a time can have of a model, among replies side by side."""


class ModelError(UserError):
    """A checkpoint, bundle, tokenizer or template that cannot be used."""

    exit_code = 3


class CheckpointError(ModelError):
    """Files, tensors or configuration of a Hugging Face checkpoint."""


class UnsupportedArchitectureError(ModelError):
    """No builder exists for the checkpoint's architecture."""


class BundleError(ModelError):
    """Manifest, hashes, paths or contents of a bundle."""


class AdapterError(ModelError):
    """An adapter that is damaged, of an unsupported kind, or not of the model."""


class TokenizerError(ModelError):
    """A tokenizer file that is missing or malformed."""


class TemplateError(ModelError):
    """A chat template that is missing, malformed or rejected the messages."""


class HubError(ModelError):
    """A model that could not be fetched from the hub."""


class BudgetError(UserError):
    """The plan does not fit the memory budget.

    Args:
        message: one line with the planned and the allowed size.
        hint: what to change.
        terms: every term of the plan in bytes.
        minimum_bytes: the smallest budget the same request would fit.
    """

    exit_code = 4

    def __init__(
        self,
        message: str | Wording,
        hint: str | Wording = "",
        *,
        terms: dict[str, int] | None = None,
        minimum_bytes: int = 0,
    ) -> None:
        super().__init__(message, hint)
        self.terms = dict(terms or {})
        self.minimum_bytes = minimum_bytes


class StorageError(UserError):
    """A path that cannot be written, or a full disk."""


class DeviceError(UserError):
    """A device that is not installed, fails, or cannot run the model."""


class RemoteError(UserError):
    """A server on another machine that cannot be reached, refuses, or runs another model than it should. It is `lost`
    where the connection failed, so that it might work another time."""

    def __init__(self, message: str | Wording, hint: str | Wording = "", *, lost: bool = False) -> None:
        super().__init__(message, hint)
        self.lost = lost


class InternalError(EdgeInferError):
    """A fault of edgeinfer or of an execution engine under it."""


class BackendError(InternalError):
    """The execution engine failed."""


class NativeUnavailableError(InternalError):
    """The native kernel is not there, does not fit this machine or failed its self-test."""
