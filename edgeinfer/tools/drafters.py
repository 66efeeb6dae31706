"""Which drafters pay on a user's own texts: each is compared with plain decoding, and those that pay are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median

import numpy as np

from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Result
from edgeinfer.model import Model
from edgeinfer.runtime.speculation.drafters.contract import State
from edgeinfer.runtime.speculation.drafters.method import drafter_method, drafter_methods
from edgeinfer.runtime.tuning.search import GAIN
from edgeinfer.tools.measuring import drafting_state, restore_drafting
from edgeinfer.tools.tuning import TUNING_PROMPTS

_OFF = "off"
# Standard errors by which a drafter that pays is faster than plain decoding.
_SURE = 2.0
# The fewest tokens after the first for which a reply's time says anything.
_FEWEST = 2


@dataclass(frozen=True)
class DrafterGain:
    """The gain of a drafter on the texts, or of several together.

    Attributes:
        drafters: one name, or several joined by ",".
        acceptance: accepted at each place of a draft, the first at index 0, of the drafts that there were.
        acceptance_rate: accepted / drafted; 0 without drafts.
        mean_accepted_length: tokens per pass of the model; 1 is plain decoding.
        guess_ms: per drafted token, including attempts without a draft.
        pass_ratio: time of a pass that verifies, in units of a plain step on the same text.
        speedup: over plain decoding on the same text, geometric mean over the texts.
        least_speedup: of the text on which it was slowest.
        error: standard error of the logarithm of `speedup`, by how repeats on the same text differ.
    """

    drafters: str
    acceptance: tuple[float, ...]
    acceptance_rate: float
    mean_accepted_length: float
    guess_ms: float
    pass_ratio: float
    speedup: float
    least_speedup: float
    error: float

    @property
    def pays(self) -> bool:
        """Whether it is faster than plain decoding by 3%, and more than two standard errors away from it."""
        # A drafter that drafted nothing is as fast as plain decoding, whatever the clock says.
        drafted = self.mean_accepted_length > 1
        return drafted and self.speedup >= 1 + GAIN and math.log(self.speedup) > _SURE * self.error


@dataclass(frozen=True)
class DraftersTuning:
    """The drafters that pay.

    Attributes:
        gains: of each drafter alone, in the order in which they are asked.
        usual: of those together that "auto" used before; None where it used none.
        together: of those together that pay alone; None where none does.
        kept: the drafters that "auto" uses from now on, besides those that cost nothing.
        unusable: why the other drafters cannot draft here, by name.
        texts: on which replies were timed.
        plain_ms: of a token by plain decoding, median over the texts.
    """

    gains: tuple[DrafterGain, ...]
    usual: DrafterGain | None
    together: DrafterGain | None
    kept: tuple[str, ...]
    unusable: Mapping[str, str]
    texts: int
    plain_ms: float


def tune_drafters(
    model: Model,
    texts: Sequence[str | Sequence[int]] | None = None,
    *,
    max_tokens: int = 96,
    repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> DraftersTuning:
    """Measures the gain of each drafter of a model on replies to some texts; "auto" uses the ones that pay from now on.

    Drafters are timed alone, alternating with plain decoding, and learn from one text for the next as they would in
    use. The ones that surely pay are then timed together, alternating with the ones that "auto" used before, and
    replace them unless they are slower. What drafters learnt here is forgotten. To go back, use `tune_drafting`.

    Args:
        texts: prompts, as text or token ids; None takes a few of edgeinfer's own.
        max_tokens: of each reply.
        repeats: replies of each drafter to each text; without two of them nothing is sure.
        progress: called with replies done and to do.

    Raises:
        UsageError: no text, none whose reply is long enough to be timed, one repeat, or no drafter that can draft here.
        PromptError, ContextLengthError: a text is empty, or leaves no room for a reply.
    """
    if repeats < 2:
        raise UsageError(f"{repeats} repeats do not tell how far timings scatter.", "Give repeats=2 or more.")
    given = TUNING_PROMPTS if texts is None else texts
    prompts = [model.tokenize_prompt(each) if isinstance(each, str) else list(each) for each in given]
    if not prompts:
        raise UsageError("There is no text to tune with.", "Give at least one.")
    with model._replies.idle() as parts:
        before = parts.speculator.state()
        usual = tuple(name for name in parts.speculator.auto if not drafter_method(name).free)
    visits = _Visits(model, before, prompts, max_tokens, repeats)
    try:
        alone, unusable = visits.usable()
        gains = visits.measured([(name,) for name in alone], progress)
        paying = _paying(tuple(gains.values()))
        together = visits.measured([names for names in dict.fromkeys((usual, paying)) if names], progress)
    finally:
        with model._replies.idle() as parts:
            parts.speculator.restore(before)
    slower = bool(usual and paying) and together[paying].speedup < together[usual].speedup
    kept = usual if slower else paying
    with model._replies.idle() as parts:
        parts.speculator.tuned(replace(parts.speculator.parts.tuning, drafters=kept))
    every = tuple(gains.values())
    return DraftersTuning(
        every, together.get(usual), together.get(paying), kept, unusable, visits.texts, visits.plain_ms
    )


def _paying(gains: Sequence[DrafterGain]) -> tuple[str, ...]:
    """The drafters that pay alone, of those that share a cache the fastest."""
    fastest = sorted((gain for gain in gains if gain.pays), key=lambda gain: -gain.speedup)
    # Drafters that share one draft model's cache: the best of them is kept.
    sharing = [gain for gain in fastest if drafter_method(gain.drafters).runs == "model"]
    second = {gain.drafters for gain in sharing[1:]}
    return tuple(gain.drafters for gain in gains if gain in fastest and gain.drafters not in second)


class _Way:
    """One way to decode, plainly or with some drafters, and what the drafters have learnt."""

    def __init__(self, model: Model, name: str, learnt: Mapping[str, State]) -> None:
        self.name = name  # as the option `speculation` has it
        self._model = model
        self._learnt = self._latest = learnt

    def reply(self, prompt: Sequence[int], max_tokens: int) -> Result:
        """Continues an uncached prompt, with the knowledge of the last call of `learn`."""
        other = prompt[0] - 1 if prompt[0] else 1
        self._model.generate([other], max_tokens=2, ignore_eos=True, speculation=self.name)
        restore_drafting(self._model, self._learnt)
        result = self._model.generate(prompt, max_tokens=max_tokens, speculation=self.name)
        self._latest = drafting_state(self._model)
        return result

    def learn(self) -> None:
        """Keeps what drafters learnt from the last reply."""
        self._learnt = self._latest


class _Visits:
    """Replies to the same texts in several ways, alternating."""

    def __init__(
        self, model: Model, learnt: Mapping[str, State], prompts: Sequence[Sequence[int]], max_tokens: int, repeats: int
    ) -> None:
        self._model = model
        self._learnt = learnt
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._repeats = repeats
        self.texts = 0  # whose replies were long enough to be timed
        self.plain_ms = 0.0  # of a token by plain decoding, median over these texts

    def usable(self) -> tuple[list[str], dict[str, str]]:
        """The drafters that can draft here, and why the others cannot."""
        usable, reasons = list[str](), dict[str, str]()
        # A grammar's tokens are drafted for nothing, and texts to tune with have no grammar.
        for name in (method.name for method in drafter_methods() if not method.free):
            try:
                self._model.generate([1], max_tokens=2, ignore_eos=True, speculation=name)
            except (UsageError, CapabilityError) as error:
                reasons[name] = error.message
                continue
            usable.append(name)
        if not usable:
            raise UsageError("No drafter can draft for this model as it is loaded.", "Load it with speculation='auto'.")
        return usable, reasons

    def measured(
        self, sets: Sequence[tuple[str, ...]], progress: Callable[[int, int], None] | None
    ) -> dict[tuple[str, ...], DrafterGain]:
        """The gain of each set of drafters, all alternating with plain decoding."""
        plain = _Way(self._model, _OFF, self._learnt)
        ways = [plain, *(_Way(self._model, ",".join(names), self._learnt) for names in sets)]
        replies: list[dict[str, list[Result]]] = []  # of each text, by way
        done, total = 0, len(self._prompts) * self._repeats * len(ways)
        for number, prompt in enumerate(self._prompts):
            found: dict[str, list[Result]] = {way.name: [] for way in ways}
            for repeat in range(self._repeats):
                start = (number + repeat) % len(ways)
                for way in (*ways[start:], *ways[:start]):
                    found[way.name].append(way.reply(prompt, self._max_tokens))
                    done += 1
                    if progress is not None:
                        progress(done, total)
            for way in ways:
                way.learn()
            if len(found[_OFF][0].token_ids) > _FEWEST:
                replies.append(found)
        if not replies:
            raise UsageError("No reply is long enough to be timed.", "Give texts that the model goes on with.")
        self.texts = len(replies)
        self.plain_ms = median(_ms(reply) for each in replies for reply in each[_OFF])
        return {names: _gain(",".join(names), replies) for names in sets}


def _ms(reply: Result) -> float:
    """Milliseconds of a token after the first."""
    return reply.timings.per_token_ms


def _gain(name: str, replies: Sequence[Mapping[str, Sequence[Result]]]) -> DrafterGain:
    # Replies of one turn are near each other in time, so a slow phase of the machine slows both. (T, R)
    plain, drafted_with = (np.array([[_ms(reply) for reply in each[way]] for each in replies]) for way in (_OFF, name))
    ratios = np.log(plain / drafted_with)
    of_texts = np.median(ratios, axis=1)
    error = math.sqrt(float(ratios.var(axis=1, ddof=1).mean()) / ratios.size)
    uses = [reply.speculation for each in replies for reply in each[name]]
    rounds, drafted = sum(use.rounds for use in uses), sum(use.drafted for use in uses)
    drafts = rounds - sum(use.choices.get("none", 0) for use in uses)
    accepted = [sum(places) for places in zip_longest(*(use.accepted_per_position for use in uses), fillvalue=0)]
    steps = sum(use.rounds * ms for use, ms in zip(uses, plain.ravel(), strict=True))
    return DrafterGain(
        drafters=name,
        acceptance=tuple(count / drafts for count in accepted),
        acceptance_rate=sum(accepted) / drafted if drafted else 0.0,
        mean_accepted_length=sum(use.mean_accepted_length * use.rounds for use in uses) / rounds if rounds else 1.0,
        guess_ms=sum(use.draft_ms for use in uses) / drafted if drafted else 0.0,
        pass_ratio=float(sum(use.verify_ms for use in uses) / steps) if steps else 1.0,
        speedup=math.exp(of_texts.mean()),
        least_speedup=math.exp(of_texts.min()),
        error=error,
    )
