"""The rules by which a draft is accepted, found by name; knows nothing of models, caches or drafters."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UsageError
from edgeinfer.runtime.speculation.contracts import Verifier
from edgeinfer.runtime.speculation.verification.keyed import verify_keyed
from edgeinfer.runtime.speculation.verification.kseq import verify_kseq
from edgeinfer.runtime.speculation.verification.rejection import verify_rejection
from edgeinfer.runtime.speculation.verification.typical import verify_typical

__all__ = ["VERIFIERS", "Verification", "find_verification"]


@dataclass(frozen=True)
class Verification:
    """A rule and what it wants of drafts.

    Attributes:
        name: as the command line knows it.
        verify: decides.
        lossless: whether text is distributed as the target's (greedy: is the target's); else it must be labelled.
        stochastic: whether guesses should be drawn from drafters' laws, independently of how the target draws, and
            carry them; else they should be what the drafter, with the target's own draw, would choose.
        iid_chains: whether a draft that branches should be chains from the root on, each drawn by itself, with equal
            tokens kept apart; else a tree whose siblings differ.
    """

    name: str
    verify: Verifier
    lossless: bool
    stochastic: bool
    iid_chains: bool


VERIFIERS: dict[str, Verification] = {
    rule.name: rule
    for rule in (
        Verification("keyed", verify_keyed, lossless=True, stochastic=False, iid_chains=False),
        Verification("rejection", verify_rejection, lossless=True, stochastic=True, iid_chains=False),
        Verification("k-seq", verify_kseq, lossless=True, stochastic=True, iid_chains=True),
        Verification("typical", verify_typical, lossless=False, stochastic=False, iid_chains=False),
    )
}


def find_verification(name: str) -> Verification:
    """The rule of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in VERIFIERS:
        raise UsageError(f"There is no verification {name!r}.", f"Choose one of {', '.join(VERIFIERS)}.")
    return VERIFIERS[name]
