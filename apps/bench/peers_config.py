"""What `edgeinfer bench peers` measures: engines, sizes, budgets, repeats; knows nothing of how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgeinfer.apps.bench.peers_engines import PEERS
from edgeinfer.errors import UsageError

__all__ = ["BUDGETS", "PeersConfig"]

MB = 10**6
BUDGETS = tuple(size * MB for size in (250, 350, 500, 700, 1000))
# Tokens whose reply within a budget is timed, and tokens of that reply.
_ASKED, _ANSWERED = 128, 64
# Tokens in the cache before a pass that is timed, and sizes of such passes.
_PAST, _SIZES = 128, (1, 4)


@dataclass(frozen=True)
class PeersConfig:
    """Settings of a run.

    Attributes:
        engines: names of `peers_engines.PEERS`.
        pythons: interpreters of engines that are not installed here.
        threads: of every engine.
        context: tokens of cache, where an engine is told; less where the model holds less.
        prompt, reply: tokens of the prompt and of the steps that are timed.
        budgets: bytes; none leaves them out.
        repeats: visits to every engine and task, and starts of it.
        rounds: processes for every engine and budget.
        patience: seconds after which a process within a budget is ended.
    """

    engines: tuple[str, ...] = tuple(PEERS)
    pythons: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    context: int = 1024
    prompt: int = 512
    reply: int = 128
    budgets: tuple[int, ...] = BUDGETS
    repeats: int = 5
    rounds: int = 3
    patience: float = 120.0

    def __post_init__(self) -> None:
        for name in (*self.engines, *self.pythons):
            if name not in PEERS:
                raise UsageError(f"Unknown engine {name!r}.", f"Known engines: {', '.join(PEERS)}.")
        if not self.engines:
            raise UsageError("There is no engine to measure.", f"Known engines: {', '.join(PEERS)}.")
        for name in ("threads", "prompt", "reply", "repeats", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name} must be at least 1, not {getattr(self, name)}.", "Leave it out for its default."
                )
        if min(self.budgets, default=1) < 1:
            raise UsageError("A budget must be at least one byte.", "Give sizes such as 250MB.")
        if self.patience <= 0:
            raise UsageError(f"patience must be above 0 s, not {self.patience}.", "Leave it out for its default.")
        if self.context < self.needed:
            message = f"A context of {self.context} tokens is too small: what is timed takes {self.needed}."
            raise UsageError(message, "Give a larger one (-c), or a shorter prompt (-p) and reply (-n).")

    @property
    def needed(self) -> int:
        """Tokens of context that what is timed takes."""
        return max(self.prompt, 1 + self.reply + 2, self.past + max(self.sizes), self.asked + self.answered) + 1

    @property
    def asked(self) -> int:
        """Tokens of the prompt whose reply is timed within a budget."""
        return _ASKED

    @property
    def answered(self) -> int:
        """Tokens of that reply."""
        return _ANSWERED

    @property
    def past(self) -> int:
        """Tokens in the cache before a pass that is timed."""
        return _PAST

    @property
    def sizes(self) -> tuple[int, ...]:
        """New tokens of such passes."""
        return _SIZES
