"""Models that decode plainly or in rounds, whoever drafts, and what their texts are compared by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle.additions import add_heads
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.decoding.sequence import Sequence as Conversation
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint
from edgeinfer.runtime.sampling.distributions import Logits
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.decoding import SpeculativeDecoding
from edgeinfer.runtime.speculation.drafters.method import DrafterParts, drafter_method
from tests.alone import Alone
from tests.cache import made
from tests.factories import make_checkpoint
from tests.heads import DRAFTING, random_heads
from tests.runtime.models import bundle_of
from tests.runtime.speculation.prices import FLAT, Prices, eager_rounds

# A text that repeats itself, so that tables have something to say.
PROMPT = [40, 51, 62, 73, 84, 95, 40, 51, 62, 73, 84, 95, 40, 51]
TOKENS = 28
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
EXPORTS = {
    "4-bit-128": ExportConfig(4, 128, keep_small=False, calibration="none"),
    "8-bit-32": ExportConfig(8, 32, keep_small=False),
    "8-bit-64": ExportConfig(8, 64, keep_small=False),
    "2-bit-128": ExportConfig(2, 128, keep_small=False, calibration="none"),
    "5-bit": ExportConfig(5, keep_small=False, calibration="none"),  # Q5_0 and Q5_K
    "float32": ExportConfig(32),
}
# A random model rambles; among three tokens it repeats itself often enough for tables to draft, and to be wrong.
FEW = dict.fromkeys((40, 51, 62), 50.0)
GREEDY = ReplyOptions(logit_bias=FEW)
SAMPLED = ReplyOptions(temperature=0.8, top_p=0.9, seed=5, logit_bias=FEW)
PENALISED = ReplyOptions(temperature=0.7, repetition_penalty=1.02, frequency_penalty=0.2, seed=6, logit_bias=FEW)


class Witness(Sampler):
    """A sampler that keeps the logits that each position was last chosen from."""

    def __init__(self, config: ReplyOptions, vocabulary: int, constraint: ChoiceConstraint | None = None) -> None:
        super().__init__(LogitsProcessor(config, vocabulary, config.seed or 0), PROMPT, constraint)
        self.logits: dict[int, Floats] = {}

    @property
    def takes_likeliest(self) -> bool:
        return False

    @property
    def follows_paths(self) -> bool:
        return True

    def sample(self, logits: Logits, position: int, path: Sequence[int] = ()) -> int:
        self.logits[position] = logits.astype(np.float32)
        return super().sample(logits, position, path)


@dataclass(frozen=True)
class Text:
    """What decoding gave."""

    tokens: list[int]
    logits: dict[int, Floats]
    cache: CacheSnapshot
    rounds: SpeculativeDecoding | None


class Subject:
    """A model that decodes plainly or in rounds, with costs under which drafting always pays."""

    def __init__(self, bundle: Bundle, backend: Alone[Any], model: Callable[[], Alone[Any]]) -> None:
        self.bundle = bundle
        self.backend = backend
        self.conversation = Conversation(backend.model, backend.cache, 8)
        self._model = cache(model)
        self._plain: dict[str, Text] = {}

    def plain(self, config: ReplyOptions) -> Text:
        """What decoding without drafts gives, decoded once."""
        key = repr(config)
        if key not in self._plain:
            self._plain[key] = self.decode(config)
        return self._plain[key]

    def decode(
        self,
        config: ReplyOptions,
        drafters: Sequence[str] = (),
        *,
        width: int = 1,
        constraint: ChoiceConstraint | None = None,
        noise: float = 0.0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> Text:
        self.conversation.forget()
        sampler = Witness(config, self.backend.geometry.vocab_size, constraint)
        rounds = self.rounds(sampler, config, drafters, width, noise) if drafters else None
        steps = self.conversation.generate(PROMPT, sampler, max_tokens=TOKENS, stop_ids=stop_ids, strategy=rounds)
        tokens = [step.token for step in steps]
        return Text(tokens, sampler.logits, self.backend.cache.snapshot(), rounds)

    def rounds(
        self, sampler: Witness, config: ReplyOptions, names: Sequence[str], width: int, noise: float
    ) -> SpeculativeDecoding:
        model = self._model() if "model" in names else None
        if model is not None:
            model.cache.trim(0)
        small, cache = (None, None) if model is None else (model.model, model.cache)
        target = self.backend.model
        parts = DrafterParts(target, self.backend.cache, small, cache, 8, TunedDrafting(), bundle=self.bundle)
        if "bits" in names and not self.backend.capabilities.high_planes:
            names = [name for name in names if name != "bits"]
            if not names:
                pytest.skip("these weights have one plane")
        made = [drafter_method(name).make(parts) for name in names]
        if isinstance(target, GraphBackend) and not self.backend.capabilities.paged:
            width = 1
        prices = Prices(FLAT, {"model": 0.1, "exit": 0.1, "bits": 0.1})
        return eager_rounds(
            self.conversation, sampler, made, prices, verification=config.verification, width=width, noise=noise
        )


def bundles(export: str, layout: Layout) -> tuple[Bundle, Bundle]:
    """A target with heads, and a smaller drafter with the same tokenizer."""
    target = made(_make_target, export, layout, Path(inspect.getfile(random_heads)))
    return open_bundle(target / "target"), bundle_of("qwen2", ExportConfig(32), **(SIZES | {"num_hidden_layers": 2}))


def _make_target(folder: Path, export: str, layout: Layout, source_of_heads: Path) -> None:
    make_checkpoint(folder / "checkpoint", "qwen2", **SIZES)
    config = replace(EXPORTS[export], layout=layout)
    target = open_bundle(export_checkpoint(folder / "checkpoint", folder / "target", config))
    for kind in DRAFTING:
        target = add_heads(target.path, random_heads(target, kind))
