"""One way to run a model, the bytes it takes by term, and what each backend tells a plan about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal, Protocol

from edgeinfer.records import dataclass

TOKENIZER = "tokenizer.json"
# What free memory has counted already, as the process had it before; what the system may take back; and what is there
# at other times. Pages of libraries are none of these, as the system counts files that are mapped as free.
_NOT_BESIDE = frozenset({"interpreter", "weights_mapped", "experts", "reserve", "loading", "activations"})
# The tokenizer is mapped from a table, stays in memory as the library has it, or is part of the model's file.
TokenizerMode = Literal["mapped", "kept", "model"]
# Replies by a grammar are not planned for; there is memory for the engine's tables of the vocabulary; or also for the
# tokens that it keeps apart for strings, without which it takes longer for their masks.
GrammarMode = Literal["none", "plain", "sliced"]


@dataclass(frozen=True)
class Configuration:
    """One way to run a model.

    Attributes:
        context: tokens of prompt plus reply the cache may hold.
        prefill_chunk: prompt tokens per pass.
        kv: how the cache stores numbers, one of KV_TYPES.
        weights: where the weights are, one of WEIGHTS_MODES.
        window_layers: layers in memory together where the weights are streamed; 0 where all are.
        kept_layers: further layers that stay in memory, and head and embedding with them; 0 where none of these do.
        drafters: names of those that may draft.
        draft_max: tokens in a draft at most; 0 is no speculation.
        tokenizer: one of `TokenizerMode`.
        expert_bytes: of experts that are in memory at once; 0 where all are, or the weights are streamed.
        expert_count: of experts that every token uses; None leaves it to the model.
        draft_model: whether a second, smaller model is in memory to draft.
        gpu_layers: of the last layers, as many as run on a graphics processor; the head counts as one.
        grammars: one of `GrammarMode`.
    """

    context: int
    prefill_chunk: int
    kv: str
    weights: str
    window_layers: int
    drafters: tuple[str, ...]
    draft_max: int
    tokenizer: TokenizerMode
    expert_bytes: int = 0
    expert_count: int | None = None
    draft_model: bool = False
    gpu_layers: int = 0
    grammars: GrammarMode = "none"
    kept_layers: int = 0


@dataclass(frozen=True)
class Footprint:
    """What a process takes, by term.

    Attributes:
        anonymous: bytes without a file behind them.
        file: bytes of mapped files that are in memory, which the system can take back and read again.
        device: bytes in memory of a device's own, which no budget of the process counts.
    """

    anonymous: Mapping[str, int]
    file: Mapping[str, int]
    device: Mapping[str, int] = field(default_factory=dict)

    @property
    def terms(self) -> dict[str, int]:
        """All of them in the process; a term of both kinds is one sum."""
        names = dict.fromkeys([*self.anonymous, *self.file])
        return {name: self.anonymous.get(name, 0) + self.file.get(name, 0) for name in names}

    @property
    def beside_weights(self) -> int:
        """Bytes that a model adds to a process while it makes tokens, beside its weights' file."""
        return sum(size for name, size in self.terms.items() if name not in _NOT_BESIDE)

    def total(self, counted: str) -> int:
        """Bytes of the pages that count: "resident" are both kinds."""
        anonymous = sum(self.anonymous.values())
        return anonymous + sum(self.file.values()) if counted == "resident" else anonymous

    def __add__(self, other: Footprint) -> Footprint:
        device = _sum(self.device, other.device)
        return Footprint(_sum(self.anonymous, other.anonymous), _sum(self.file, other.file), device)


def _sum(mine: Mapping[str, int], theirs: Mapping[str, int]) -> Mapping[str, int]:
    # A plan adds tens of thousands of them.
    if not mine or not theirs:
        return mine or theirs
    total = dict(mine)
    for name, size in theirs.items():
        total[name] = total.get(name, 0) + size
    return total


class ModelMemory(Protocol):
    """What one model takes where it runs on its backend; all figures are upper bounds."""

    def import_libraries(self) -> None:
        """Imports what loading will import, so that a process can be measured with it."""

    def weights(self, configuration: Configuration) -> Footprint:
        """Copies of the weights, and pages of their file."""

    def running(self, configuration: Configuration) -> Footprint:
        """Session, cache and the largest pass; "code" is of files that a second model on the backend shares."""

    def tokenizer(self, mode: TokenizerMode, *, used: bool) -> Footprint:
        """What the tokenizer takes before it encoded any text, or with the words it has seen since."""

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """What the process is at times beyond what stays: while a tokenizer is parsed, while the session is made.

        Args:
            outside: the process without a model, while one is loaded.
        """
