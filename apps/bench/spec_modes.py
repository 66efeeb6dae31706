"""Ways to decode that a speculation benchmark compares, behind one face; knows nothing of order, repeats or tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.spec_results import CONTROL, PLAIN, Reply
from edgeinfer.results import Result

__all__ = ["EdgeInferMode", "Generates", "Learns", "LlamaCppMode", "Mode", "Sampling"]


@dataclass(frozen=True)
class Sampling:
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

    def reply(self, prompt: Sequence[int]) -> Reply:
        """Continues a prompt, knowing what it knew when `learn` was last called."""

    @property
    def learns(self) -> bool:
        """Whether a reply teaches anything that later ones use."""

    def learn(self) -> None:
        """Keeps what the last reply taught."""


class Generates(Protocol):
    """The part of a model that makes replies."""

    def generate(self, prompt: Sequence[int], **options: Any) -> Result:
        """Continues a prompt."""


@runtime_checkable
class Learns(Protocol):
    """A model whose drafters learn from replies, and can be put back to what they knew."""

    def drafting_state(self) -> Any:
        """All that was learnt; a copy."""

    def restore_drafting(self, state: Any) -> None:
        """Takes back what `drafting_state` gave."""


class EdgeInferMode:
    """A model with some drafters.

    Every reply begins with an empty cache, of draft models too, and with drafters that know what earlier prompts
    taught them in this mode: neither repeats nor other modes' replies to the same prompt.

    Args:
        model: shared by all modes.
        name: drafters joined by "+", "auto", "off", or CONTROL, which is "off" under another name.
        sampling: of the replies.
    """

    plain = PLAIN

    @property
    def learns(self) -> bool:
        """Whether a reply teaches anything that later ones use."""
        return self.name not in (PLAIN, CONTROL)

    def __init__(self, model: Generates, name: str, sampling: Sampling) -> None:
        self.name = name
        self._model = model
        self._options = {
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "speculation": PLAIN if name == CONTROL else name.replace("+", ","),
        }
        self._max_tokens = sampling.max_tokens
        self._known = self._latest = model.drafting_state() if isinstance(model, Learns) else None

    def reply(self, prompt: Sequence[int]) -> Reply:
        """See Mode."""
        self._empty_caches(prompt)
        if isinstance(self._model, Learns):
            self._model.restore_drafting(self._known)
        result = self._model.generate(prompt, max_tokens=self._max_tokens, **self._options)
        if isinstance(self._model, Learns):
            self._latest = self._model.drafting_state()
        later = max(len(result.token_ids) - 1, 0)
        return Reply(
            token_ids=result.token_ids,
            per_token_ms=result.timings.per_token_ms,
            rounds=result.speculation.rounds or later,
            lossless=result.speculation.lossless,
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

    def __init__(self, worker: Worker, sampling: Sampling, stop_ids: Sequence[int], lookup: int = 0) -> None:
        self.name = f"llama.cpp lookup {lookup}" if lookup else self.plain
        self._worker = worker
        self._max_tokens = sampling.max_tokens
        self._stop_ids = list(stop_ids)
        self._lookup = lookup

    def reply(self, prompt: Sequence[int]) -> Reply:
        """See Mode."""
        answer: Mapping[str, Any] = self._worker.generate(prompt, self._max_tokens, self._stop_ids, self._lookup)
        later = len(answer["token_ids"]) - 1
        per_token_ms = answer["ms"] / later if later else 0.0
        return Reply(tuple(answer["token_ids"]), per_token_ms, answer["rounds"], True, {"ms": answer["ms"]})

    def learn(self) -> None:
        """Nothing is kept: lookup reads the prompt and the reply."""
