"""Speculation of a loaded model: its drafters, what they have learnt, what they cost. Made once per model. Each
generation takes its `strategy`, and its `summary` when it is over."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from weakref import WeakSet

from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options.decoding import drafters_in
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.results import SpeculationUse
from edgeinfer.runtime.decoding import sequence as decoding
from edgeinfer.runtime.decoding.sequence import Strategy
from edgeinfer.runtime.profile.costs import asking_pays
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.profile.drafting import DRAFTED, TUNED_DRAFTING, DraftHistory, TunedDrafting
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.speculation.batch import BatchController, SequenceDrafting
from edgeinfer.runtime.speculation.controller import Acceptance, DraftController, RoundCosts, StochasticController
from edgeinfer.runtime.speculation.costs import DeviceCosts, RoundTimings
from edgeinfer.runtime.speculation.decoding import SpeculativeDecoding
from edgeinfer.runtime.speculation.drafters.contract import Drafter, State
from edgeinfer.runtime.speculation.drafters.method import DrafterParts, asked_by_auto, drafter_method
from edgeinfer.runtime.speculation.verification.rule import VerificationRule, find_verification

_log = logging.getLogger("edgeinfer")

# What is learnt is written when the model closes, and after a reply if the last time is longer ago than this.
_SAVE_S = 60.0
# Plain steps whose median stands for plain decoding.
_PLAIN_STEPS = 64
_ACCEPTANCE = "acceptance"


class Speculator:
    """Makes the decoding strategies of generations; drafts up to `most` tokens, 0 never."""

    def __init__(
        self,
        parts: DrafterParts,
        loaded: str,
        drafters: tuple[str, ...],
        most: int,
        profile: DeviceProfile,
        check: bool,
    ) -> None:
        self.parts = parts
        self._allowed = drafters if most else ()
        self._planned = self._allowed
        self._loaded = loaded
        self._chosen = loaded != "auto"
        self._most = self._limit = most
        self._profile = profile
        self._costs = DeviceCosts(parts.target, parts.cache, profile, check, most + 1, self._made)
        self._drafters: dict[str, Drafter] = {}
        self._acceptance = Acceptance()
        self._kept = (profile.arrays(_ACCEPTANCE) or {}) if self._allowed else {}
        self._plain_ms: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._history = DraftHistory(profile.arrays(DRAFTED))
        # Of replies that run or are paused.
        self._live: WeakSet[SpeculativeDecoding] = WeakSet()
        self._drafting: WeakSet[SequenceDrafting] = WeakSet()  # of sequences side by side
        self._saved = time.monotonic()
        if self._allowed:
            self._costs.prepare()
            self._plain_ms.extend(self._costs.plain_ms)
            self._measure()

    def _measure(self) -> None:
        """Find out what drafting costs, as far as that is not known."""
        self._costs.of([self._drafter(name) for name in self._names(self._loaded)])

    @property
    def auto(self) -> tuple[str, ...]:
        """The drafters that "auto" asks."""
        return self._names("auto")

    @property
    def plain_ms(self) -> float | None:
        """A plain step, the median of this process's latest; None before the first was timed."""
        return median(self._plain_ms) if self._plain_ms else None

    @property
    def most(self) -> int:
        """Tokens in a draft at most; 0 where nothing drafts."""
        return self._limit if self._allowed else 0

    @property
    def pass_ms(self) -> Callable[[int], float] | None:
        """Milliseconds of a pass of the target by its rows; None where that is not known yet."""
        return self._costs.pass_ms

    def observe_pass(self, rows: int, ms: float) -> None:
        """Learn from a pass over so many rows that replies shared."""
        self._costs.observe(rows, ms)

    def strategy(
        self,
        sequence: decoding.Sequence,
        sampler: Sampler,
        config: ReplyOptions,
        drafting: SequenceDrafting | None = None,
        before: Strategy | None = None,
    ) -> Strategy:
        """Make the strategy of a generation: speculative, or plain decoding. With `drafting` others share its passes,
        and it may be the rest of one that had its own (`before`); then only the keyed rule gives the text that the
        reply has alone, whatever is drafted, and by another it decodes plainly."""
        names = self._names(config.speculation)
        drafters = [self._drafter(name) for name in names] if self._limit else []
        if drafting is not None:
            drafters = drafting.of_sequence(drafters) if find_verification(config.verification).exact else []
        if not drafters:
            return Strategy(sequence, sampler)
        verification = find_verification(config.verification)
        costs, width, exact = self._costs.of(drafters), self._width(config, verification), self._costs.exact
        if not self._may_pay(config, drafters, costs):
            return Strategy(sequence, sampler)
        given = (drafters, costs, self._acceptance, min(self._limit, config.draft_max or self._limit), width)
        use, timings = SpeculationUse(config.speculation, verification.name, verification.lossless), RoundTimings()
        if isinstance(before, SpeculativeDecoding):
            use, timings = before.speculation, before.timings
        if drafting is None:
            controller = StochasticController(*given) if verification.stochastic else DraftController(*given)
        else:
            self._drafting.add(drafting)
            controller, timings.alone = BatchController(*given, drafting.texts), False
        strategy = SpeculativeDecoding(
            sequence,
            sampler,
            drafters,
            controller,
            verification,
            noise=0.0 if verification.stochastic or exact is None else exact.noise,
            on_plain_ms=self._plain_ms.append,
            speculation=use,
            timings=timings,
        )
        self._live.add(strategy)
        return strategy

    def _may_pay(self, config: ReplyOptions, drafters: Sequence[Drafter], costs: RoundCosts) -> bool:
        """Whether drafts can pay for asking their tables, where it was left to the model whether to draft."""
        if config.speculation != "auto" or self._chosen or config.choices:
            return True
        # A draft model or layers of one's own have passes to pay for; the tables alone decide.
        cheap = sum(costs.guess_ms(drafter.name) for drafter in drafters if not drafter.draws)
        return asking_pays(costs.round_ms + cheap, costs.pass_ms(1))

    @property
    def nbytes(self) -> int:
        own = sum(drafter.nbytes() for drafter in self._drafters.values())
        return own + sum(drafting.nbytes() for drafting in self._drafting)

    def shorten(self) -> bool:
        """Draft half as many tokens from the next round on; false where drafts cannot be shorter."""
        if self._limit <= 1 or not self._drafters:
            return False
        self._limit //= 2
        self._limit_live(self._limit)
        return True

    def drop(self) -> bool:
        """Decode plainly from the next round on and free the drafters; false where there are none."""
        if not self._drafters:
            return False
        self.save()
        self._limit = 0
        self._limit_live(0)
        for drafter in self._drafters.values():
            drafter.close()
        self._drafters.clear()
        return True

    def plan_for(self, drafters: tuple[str, ...], most: int) -> None:
        """Set the drafters, of those it was loaded with, and how far they draft, from the next reply on."""
        self._planned, self._most, self._limit = drafters, most, most
        self._close(self._drafters.keys() - set(drafters))

    def _close(self, names: Collection[str]) -> None:
        """Free drafters; replies that are paused decode plainly to their end, as some of them may be theirs."""
        if names:
            self._limit_live(0)
        for name in names:
            self._drafters.pop(name).close()

    def _limit_live(self, most: int) -> None:
        for strategy in self._live:
            strategy.limit(most)

    def recover(self) -> None:
        """Draft again as it did before `shorten` and `drop`."""
        self._limit = self._most

    def _names(self, asked: str) -> tuple[str, ...]:
        """The drafters that a generation means, of those the model was loaded with."""
        if asked == "off":
            return ()
        if asked == "auto":
            # Drafters that the model was loaded with by name were wanted.
            return tuple(name for name in self._planned if self._chosen or asked_by_auto(name, self.parts))
        names = drafters_in(asked)
        for name in names:
            if name not in self._allowed:
                allowed = f"only with {', '.join(self._allowed)}" if self._allowed else "without drafters"
                message = f"{name} cannot draft: the model was loaded {allowed}."
                raise UsageError(message, f"Load it with speculation='auto', or with {name} among the drafters.")
        return names

    def _drafter(self, name: str) -> Drafter:
        """The drafter of this name, with what was kept of it."""
        if name not in self._drafters:
            drafter = self._made(name)
            self._acceptance.add(name, drafter.priors)
            try:
                drafter.restore(self._profile.arrays(name) or {})
                self._acceptance.restore(name, self._kept)
            except StorageError as error:
                _log.warning("%s It starts again from nothing.", error.message)
                self._profile.drop(name)
            self._drafters[name] = drafter
        return self._drafters[name]

    def _made(self, name: str) -> Drafter:
        return drafter_method(name).make(self.parts)

    def _width(self, config: ReplyOptions, verification: VerificationRule) -> int:
        width = config.draft_width
        if width > 1 and not self.parts.target.capabilities.tree:
            message = f"The {self.parts.target.name} backend cannot verify trees."
            raise UsageError(message, "Draft chains (draft_width=1), or use a natively exported bundle.")
        # Where attention reads no pages, rows of side branches have other bits than a chain's, so where text is to be
        # plain decoding's bit for bit no token behind them could be kept.
        settled = self._costs.exact is not None and self._costs.exact.bit_identical
        if settled and verification.exact and not self.parts.target.capabilities.paged:
            return 1
        return width

    def summary(self, config: ReplyOptions, strategy: Strategy, per_token_ms: float) -> SpeculationUse:
        """Tell what drafting did in a reply, whose tokens after the first took `per_token_ms` each."""
        use, plain = SpeculationUse(config.speculation if self._allowed else "off"), self.plain_ms
        if isinstance(strategy, SpeculativeDecoding):
            use, timings = strategy.speculation, strategy.timings
            plain = self._costs.plain_step_ms(timings) if plain is None else plain
            use.speedup_vs_plain = plain / per_token_ms if plain and per_token_ms and timings.alone else None
        use.exact, use.plain_ms = self._is_exact(config), plain
        return use

    def _is_exact(self, config: ReplyOptions) -> bool | None:
        if config.speculation != "off" and not find_verification(config.verification).exact:
            return False
        exact = self._costs.exact
        return None if exact is None else exact.bit_identical

    def tuned(self, tuning: TunedDrafting) -> None:
        """Draft as this says from now on, and keep it and what that costs."""
        self.parts = replace(self.parts, tuning=tuning)
        stale = {name for name in self._drafters if drafter_method(name).tuned}
        self._close(stale)
        for name in stale:
            self._costs.forget(name)
        self._profile.save_arrays(TUNED_DRAFTING, tuning.state())
        if self._limit:
            self._measure()

    def state(self) -> dict[str, State]:
        """Copies of all that was learnt."""
        kept = {name: drafter.state() for name, drafter in self._drafters.items()}
        state: dict[str, State] = {name: {key: a.copy() for key, a in each.items()} for name, each in kept.items()}
        return {_ACCEPTANCE: self._acceptance.state()} | state

    def restore(self, state: Mapping[str, State]) -> None:
        """Put back what `state` gave, in place of what was learnt since; without anything, all is forgotten."""
        self._acceptance = Acceptance()
        self._limit_live(0)
        for name, drafter in self._drafters.items():
            self._acceptance.add(name, drafter.priors)
            self._acceptance.restore(name, state.get(_ACCEPTANCE, {}))
            drafter.close()
            self._drafters[name] = self._made(name)
            self._drafters[name].restore(state.get(name, {}))

    def finished(self, strategy: Strategy, overhead_ms: Sequence[float] = ()) -> None:
        """A reply is over: costs follow its passes, and what plain tokens took besides theirs in milliseconds; what was
        learnt is kept, not more often than once a minute."""
        self._costs.learn_overhead(overhead_ms)
        if isinstance(strategy, SpeculativeDecoding):
            self._live.discard(strategy)
            self._costs.learn(strategy.timings)
            done, alone = strategy.speculation, strategy.timings.alone
            self._history.add(done.rounds * alone, done.choices.get("none", 0), done.per_drafter)
        if time.monotonic() - self._saved > _SAVE_S:
            self.save()

    def save(self) -> None:
        """Keep what was learnt."""
        self._saved = time.monotonic()
        if self._drafters and self._profile.keeps:
            self._costs.save()
            self._profile.save_arrays(_ACCEPTANCE, self._kept | self._acceptance.state())
            self._profile.save_arrays(DRAFTED, self._history.state())
            for name, drafter in self._drafters.items():
                if learnt := drafter.state():
                    self._profile.save_arrays(name, learnt)

    def close(self) -> None:
        """Keep what was learnt and free the drafters."""
        self.save()
        for drafter in self._drafters.values():
            drafter.close()
        if self.parts.model is not None:
            self.parts.model.close()
