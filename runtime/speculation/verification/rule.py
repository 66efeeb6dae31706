"""The contract of verification rules."""

from __future__ import annotations

from typing import cast

from edgeinfer.core.methods import DeclaredMethod, find_method
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.speculation.drafters.contract import Verifier


@dataclass(frozen=True, kw_only=True)
class VerificationRule(DeclaredMethod):
    """A rule as its file declares it, and what it wants of drafts."""

    verify: Verifier  # decides about a draft
    exact: bool = False  # whether text is plain decoding's, bit for bit
    lossless: bool = True  # whether text is distributed as the target's; else it must be labelled
    # Whether guesses should be drawn from drafters' distributions, independently of how the target draws, and carry
    # them; else they should be what the drafter, with the target's own draw, would choose.
    stochastic: bool = False


def find_verification(name: str) -> VerificationRule:
    """The rule of this name; UsageError where there is none."""
    return cast(VerificationRule, find_method("verifiers", name))
