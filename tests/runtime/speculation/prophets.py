"""Drafters whose quality is known, and texts decoded with them by priced costs, for tests of the controller."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.speculation.controller import Acceptance, DraftController, RoundCosts
from edgeinfer.runtime.speculation.drafters.contract import (
    Draft,
    DraftContext,
    Drafter,
    Guess,
    Round,
    Verdict,
)
from edgeinfer.runtime.speculation.verification.keyed import verify_keyed
from tests.runtime.speculation.prices import Prices
from tests.runtime.speculation.verification.enumeration import settle


class Prophet(Drafter):
    """Knows the text and says the right token with a given probability; sign 1 where it is surer."""

    branches = True
    uses_target = False
    draws = False
    priors = (0.3, 0.7)
    behind = 0  # tokens that it has yet to read

    def __init__(self, name: str, text: Sequence[int], right: float, *, seed: int = 0) -> None:
        self.name = name
        self.asked = 0
        self._text = text
        self._right = right
        self._seed = seed

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        self.asked += 1
        place = len(context.tokens) + len(drafted)
        if place >= len(self._text):
            return ()
        fortune = random.Random(f"{self._seed}-{place}")
        right = fortune.random() < self._right
        first = self._text[place] if right else self._text[place] + 1
        return [Guess((first + other) % 100, int(self._right > 0.5)) for other in range(width)]


class Coin(Prophet):
    """Knows two tokens for the first place of a draft, of which one is right, and does not know which."""

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        if drafted:
            return ()
        right, wrong = (Guess(self._text[len(context.tokens)] + other, 0) for other in (0, 1))
        return (right, wrong) if random.Random(len(context.tokens)).random() < 0.5 else (wrong, right)


class Late(Prophet):
    """Has nothing to say before a place of the text."""

    place = 40

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        return super().guesses(context, drafted, width) if len(context.tokens) >= self.place else ()


class Follower(Prophet):
    """Knows how a draft goes on that another began."""

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        return super().guesses(context, drafted, width) if drafted else ()


class Boaster(Prophet):
    """Is sure of a token that never comes."""

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        self.asked += 1
        return [Guess(200, 1)]


class Reader(Prophet):
    """Reads a prompt before its first guess."""

    draws = True
    behind = 200

    def __init__(self, name: str, text: Sequence[int], right: float, *, seed: int = 0) -> None:
        super().__init__(name, text, right, seed=seed)
        self.lengths: list[int] = []  # lengths of the texts at which it was asked how much it has to read

    def unread(self, context: DraftContext) -> int:
        self.lengths.append(len(context.tokens))
        return self.behind

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        self.behind = 0
        return super().guesses(context, drafted, width)


@dataclass
class Truth:
    """The target's view where the target says the text."""

    text: Sequence[int]
    start: int
    draft: Draft

    def token(self, node: int) -> int:
        return self.text[self.start + len(self.draft.path(node))]


@dataclass
class Run:
    """What decoding a text came to."""

    controller: DraftController
    sizes: list[int]
    ms: float
    drafts: list[Draft]
    passes: list[tuple[int, float]]

    @property
    def plain_ms(self) -> float:
        return 10.0 * sum(self.sizes)


def learning(drafters: Sequence[Prophet]) -> Acceptance:
    acceptance = Acceptance()
    for drafter in drafters:
        acceptance.add(drafter.name, drafter.priors)
    return acceptance


def decode(
    drafters: Sequence[Prophet],
    text: Sequence[int],
    prices: Prices,
    most: int = 15,
    width: int = 1,
    rests: bool = False,
    kind: type[DraftController] = DraftController,
    believed: RoundCosts | None = None,
) -> Run:
    """Decode a text with perfect verification, by the prices; the controller knows them if it believes no others.
    Plain steps are taken where it rests, if `rests`."""
    controller = kind(drafters, believed or prices, learning(drafters), most, width)
    context = DraftContext(list(text[:1]), lambda logits, drafted: (0, None), lambda drafted: ())
    run = Run(controller, [], 0.0, [], [])
    while len(context.tokens) < len(text):
        steps = min(controller.rest, len(text) - len(context.tokens)) if rests else 0
        if steps:
            controller.rested(steps)
            run.ms += steps * prices.pass_ms(1)
            context.tokens.extend(text[len(context.tokens) : len(context.tokens) + steps])
            run.sizes += [1] * steps
            run.passes += [(1, prices.pass_ms(1))] * steps
            continue
        room = len(text) - len(context.tokens) - 1
        before = [(d.asked, d.behind) for d in drafters]
        draft = run_alone(controller.draft(context, room, room))
        asked = 0.0
        for drafter, (times, behind) in zip(drafters, before, strict=True):
            asked += (drafter.asked - times) * prices.guess_ms(drafter.name)
            asked += (behind - drafter.behind) * prices.read_ms(drafter.name)
        run.passes.append((1 + len(draft), prices.pass_ms(1 + len(draft))))
        run.ms += run.passes[-1][1] + asked + prices.round_ms
        verdict: Verdict = settle(verify_keyed(draft, Truth(text, len(context.tokens), draft)))  # type: ignore[arg-type]
        committed = (*(draft.guesses[n].token for n in verdict.accepted), verdict.token)
        fed = np.array([context.tokens[-1], *draft.tokens])
        context.tokens.extend(committed)
        controller.observe(Round(draft, verdict, committed, fed, np.zeros((len(fed), 1), np.float32)))
        run.sizes.append(len(committed))
        run.drafts.append(draft)
    return run


def text_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(90) for i in range(length)]
