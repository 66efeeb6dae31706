"""The contract of verification rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from edgeinfer.bundle.additions import Heads
from edgeinfer.core.methods import DeclaredMethod, find_method
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.drafters.contract import Verifier
from edgeinfer.runtime.speculation.drafters.method import DrafterParts


@dataclass(frozen=True)
class Lesson:
    """What a rule is taught with."""

    text: str  # of the user's choice; each rule says what it must hold
    # `model`, `drafter`: the loaded model and its draft model, as the rule's file asks of them.
    model: Any
    drafter: Any
    last_state: Callable[[Sequence[int]], Floats]  # the model's state in the row of the last of some tokens. (D,)
    progress: Callable[[int, int], None]  # called with the parts done and to do


@dataclass(frozen=True, kw_only=True)
class VerificationRule(DeclaredMethod):
    """A rule as its file declares it, and what it wants of drafts."""

    verify: Verifier  # decides about a draft
    # Makes `verify` of a loaded model, where the rule reads something of its bundle.
    bind: Callable[[DrafterParts], Verifier] | None = None
    exact: bool = False  # whether text is plain decoding's, bit for bit
    # Whether text is distributed as the target's (greedy: is the target's); else it must be labelled.
    lossless: bool = True
    # Whether guesses should be drawn from drafters' distributions, independently of how the target draws, and carry
    # them; else they should be what the drafter, with the target's own draw, would choose.
    stochastic: bool = False
    # Trains what the rule reads of a bundle; None where it reads nothing.
    teach: Callable[[Lesson], tuple[Heads, Mapping[str, Any]]] | None = None


def find_verification(name: str, parts: DrafterParts | None = None) -> VerificationRule:
    """The rule of this name, bound to a loaded model where there is one; UsageError where there is no such rule."""
    rule = cast(VerificationRule, find_method("verifiers", name))
    return rule if parts is None or rule.bind is None else replace(rule, verify=rule.bind(parts))
