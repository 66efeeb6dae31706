"""Ways to decode that `bench spec` compares, behind one face, and the order in which they take turns.

Plain decoding is the same model in the same process with drafting off. Modes take turns on each prompt, so that a
machine that slows down slows all of them; a prompt's figure is the median of its repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Protocol, runtime_checkable

import edgeinfer
from edgeinfer import Model
from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.prompts import TokenizedPrompt
from edgeinfer.apps.bench.spec_results import CONTROL, PLAIN, PromptTimes, SpecReply, mode_name, plain_of
from edgeinfer.apps.bench.timing import rotated
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.results import Result

_KEYED = "keyed"  # by which text is that of plain decoding


@dataclass(frozen=True)
class DraftForm:
    """How drafts grow, and how they are verified.

    Attributes:
        verification: rule by which they are accepted.
        width: guesses per drafter and place.
    """

    verification: str = _KEYED
    width: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        """What a mode's name says of it."""
        rule, width = self.verification, f"width {self.width}" if self.width > 1 else ""
        return tuple(filter(None, ("" if rule == _KEYED else rule, width)))


@dataclass(frozen=True)
class ReplySettings:
    """How every mode generates: the likeliest token each time at temperature 0, else drawn with the seed."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0


class Mode(Protocol):
    """A way to decode.

    Attributes:
        name: unlike any other's.
        plain: the name of the mode that says the same without drafting.
    """

    name: str
    plain: str

    def reply(self, prompt: Sequence[int]) -> SpecReply:
        """Continues a prompt, knowing what it knew when `learn` was last called."""

    @property
    def learns(self) -> bool:
        """Whether a reply teaches anything that later ones use."""

    def learn(self) -> None:
        """Keeps what the last reply taught."""


class Generates(Protocol):
    """The part of a model that makes replies."""

    @property
    def generate(self) -> Callable[..., Result]:
        """Continues a prompt."""


_CHAINS = DraftForm()


@runtime_checkable
class Learns(Protocol):
    """A model whose drafters learn from replies, and can be put back to what they knew."""

    def drafting_state(self) -> Any:
        """All that was learnt; a copy."""

    def restore_drafting(self, state: Any) -> None:
        """Takes back what `drafting_state` gave."""


class LearningModel:
    """A loaded model as `Generates` and `Learns`."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def generate(self) -> Callable[..., Result]:
        """See Generates."""
        return self._model.generate

    def drafting_state(self) -> Any:
        """See Learns."""
        return edgeinfer.tools.drafting_state(self._model)

    def restore_drafting(self, state: Any) -> None:
        """See Learns."""
        edgeinfer.tools.restore_drafting(self._model, state)


class EdgeInferMode:
    """A model with some drafters.

    Every reply begins with an empty cache, of draft models too, and with drafters that know what earlier prompts
    taught them in this mode: neither repeats nor other modes' replies to the same prompt.

    Args:
        model: shared by all modes.
        drafters: joined by "+", or "auto", "off", or CONTROL, which is "off" under another name.
        sampling: of the replies.
        form: of drafts.
        told: say the temperature in the name, where others are measured too.
    """

    @property
    def learns(self) -> bool:
        """Whether a reply teaches anything that later ones use."""
        return self._options["speculation"] != PLAIN

    def __init__(
        self,
        model: Generates,
        drafters: str,
        sampling: ReplySettings,
        form: DraftForm = _CHAINS,
        *,
        told: bool = False,
    ) -> None:
        self.name = mode_name(" ".join((drafters, *form.words)), sampling.temperature if told else None)
        self.plain = plain_of(self.name)
        self._model = model
        self._options = {
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "speculation": PLAIN if drafters == CONTROL else drafters.replace("+", ","),
            "verification": form.verification,
            "draft_width": form.width,
        }
        self._max_tokens = sampling.max_tokens
        self._known = self._latest = model.drafting_state() if isinstance(model, Learns) else None

    def reply(self, prompt: Sequence[int]) -> SpecReply:
        """See Mode."""
        self._empty_caches(prompt)
        if isinstance(self._model, Learns):
            self._model.restore_drafting(self._known)
        result = self._model.generate(prompt, max_tokens=self._max_tokens, **self._options)
        if isinstance(self._model, Learns):
            self._latest = self._model.drafting_state()
        later = max(len(result.token_ids) - 1, 0)
        return SpecReply(
            token_ids=result.token_ids,
            per_token_ms=result.timings.per_token_ms,
            rounds=result.speculation.rounds or later,
            # Others are another draw of the same distribution.
            lossless=result.speculation.lossless and self._options["verification"] == _KEYED,
            details=asdict(result.speculation) | {"timings": asdict(result.timings)},
        )

    def learn(self) -> None:
        """See Mode."""
        self._known = self._latest

    def _empty_caches(self, prompt: Sequence[int]) -> None:
        """Generates from another first token, so that nothing of the prompt is left in a cache of target or drafter."""
        other = prompt[0] - 1 if prompt[0] else 1
        self._model.generate([other], max_tokens=2, ignore_eos=True, **self._options)


class LlamaCppMode:
    """llama.cpp in its worker process, greedily; with the prompt lookup of its Python binding or plainly.

    Args:
        worker: shared by all of its modes.
        sampling: only max_tokens counts.
        stop_ids: tokens that end a reply.
        lookup: tokens to draft at most; 0 is plain.
    """

    plain = "llama.cpp"
    learns = False

    def __init__(self, worker: Worker, sampling: ReplySettings, stop_ids: Sequence[int], lookup: int = 0) -> None:
        self.name = f"llama.cpp lookup {lookup}" if lookup else self.plain
        self._worker = worker
        self._max_tokens = sampling.max_tokens
        self._stop_ids = list(stop_ids)
        self._lookup = lookup

    def reply(self, prompt: Sequence[int]) -> SpecReply:
        """See Mode."""
        answer: Mapping[str, Any] = self._worker.generate(prompt, self._max_tokens, self._stop_ids, self._lookup)
        later = len(answer["token_ids"]) - 1
        per_token_ms = answer["ms"] / later if later else 0.0
        return SpecReply(tuple(answer["token_ids"]), per_token_ms, answer["rounds"], True, {"ms": answer["ms"]})

    def learn(self) -> None:
        """Nothing is kept: lookup reads the prompt and the reply."""


# Lengths of llama.cpp's prompt lookup: its binding's default, and what its documentation advises for CPUs.
LOOKUPS = (10, 2)


@dataclass(frozen=True)
class SpecConfig:
    """What is compared.

    Attributes:
        modes: "off", "auto", CONTROL, or drafters joined by "+"; plain decoding is always measured, and comes first.
        replies: how each is generated.
        repeats: replies of each mode to each prompt.
        verifications, widths: of drafts, each of which every mode that drafts is measured with.
        temperatures: besides that of `replies`, at each of which all of it is measured once more.
    """

    modes: tuple[str, ...] = (PLAIN, "auto")
    replies: ReplySettings = field(default_factory=ReplySettings)
    repeats: int = 3
    verifications: tuple[str, ...] = (_KEYED,)
    widths: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", tuple(dict.fromkeys((PLAIN, *self.modes))))
        if self.repeats < 1:
            raise UsageError(f"repeats must be at least 1, not {self.repeats}.", "See --help.")
        if self.replies.max_tokens < 3:
            raise UsageError("Replies of fewer than 3 tokens cannot be timed.", "Ask for more (-n).")

    @property
    def forms(self) -> list[DraftForm]:
        """Forms of drafts that there are, of all that the axes name."""
        return [DraftForm(rule, width) for rule, width in product(self.verifications, self.widths)]


def edgeinfer_modes(model: Generates, config: SpecConfig, skipped: dict[str, str]) -> list[Mode]:
    """The modes of a model, each tried once; those that it cannot run are put in `skipped` with the reason."""
    runnable: list[Mode] = []
    # All are made before any is tried: each starts from what drafters know now.
    made: list[Mode] = []
    for temperature in (config.replies.temperature, *config.temperatures):
        replies, told = replace(config.replies, temperature=temperature), temperature in config.temperatures
        for name in config.modes:
            forms = config.forms if name not in (PLAIN, CONTROL) else [_CHAINS]
            made += [EdgeInferMode(model, name, replies, form, told=told) for form in forms]
    for mode in made:
        try:
            mode.reply([1])
        except EdgeInferError as error:
            if mode.name == PLAIN:
                raise
            skipped[mode.name] = str(error)
            continue
        runnable.append(mode)
    return runnable


def llamacpp_modes(worker: Worker, config: SpecConfig, stop_ids: Sequence[int]) -> list[Mode]:
    """llama.cpp plainly and with its prompt lookup."""
    if config.replies.temperature > 0:
        raise UsageError("llama.cpp is compared at temperature 0 only.", "Leave out --temp or --llamacpp.")
    return [LlamaCppMode(worker, config.replies, stop_ids, lookup) for lookup in (0, *LOOKUPS)]


def measure(
    prompts: Sequence[TokenizedPrompt],
    modes: Sequence[Mode],
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[PromptTimes]:
    """Replies of every mode to each prompt in turn.

    Args:
        progress: called with the replies done and their number.
    """
    plain = {mode.name: mode.plain for mode in modes}
    total = len(prompts) * len(modes) * repeats
    done = 0
    for number, item in enumerate(prompts):
        replies: dict[str, list[SpecReply]] = {mode.name: [] for mode in modes}
        for repeat in range(repeats):
            for mode in rotated(modes, number + repeat):
                if progress:
                    progress(done, total)
                replies[mode.name].append(mode.reply(item.ids))
                done += 1
        for mode in modes:
            mode.learn()
        yield PromptTimes(item, replies, plain)
