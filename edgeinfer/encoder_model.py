"""An encoder as a model: it embeds texts, or scores documents for a query."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.bundle.embedding import embedding_use
from edgeinfer.core.errors import CapabilityError, ContextLengthError, PromptError, UsageError, shown
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.results import Embeddings, LoadCosts, ModelInfo, Progress, Ranking
from edgeinfer.embedding import cut, normalized, prompt_of, ranking
from edgeinfer.model import Model
from edgeinfer.runtime.backends.onnx.encoder import Encoded, Encoder, encodes_only
from edgeinfer.runtime.planning.facts import TOKENIZER, BundleFacts
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.text.tokenizer import Tokenizer
from edgeinfer.runtime.weights.verification import Verification
from edgeinfer.tokenizing import token_ids

if TYPE_CHECKING:
    from edgeinfer.core.options.types import Prompt


class EncoderModel(Model):
    """A loaded encoder: it embeds texts, or scores documents, and generates nothing. Safe from several threads, whose
    calls take turns."""

    def __init__(
        self, facts: BundleFacts, plan: MemoryPlan, config: LoadOptions, started: float, progress: Progress | None
    ) -> None:
        plan.require_fit()
        bundle, manifest = facts.bundle, facts.manifest
        assert manifest.decoder is not None and manifest.decoder.encoder is not None, "its backend is an encoder's"
        verification = Verification([bundle], keeps=config.remember)
        self._facts, self._planned, self._use = facts, plan, embedding_use(bundle)
        self.scores = manifest.decoder.encoder.scores
        self._tokenizer = Tokenizer.from_file(bundle.file(TOKENIZER))
        self._encoder = Encoder(facts, plan.context, self._use.pooling, progress)
        verification.finish()
        verification.require()
        self._costs = LoadCosts((time.perf_counter() - started) * 1e3, 0.0, 0)
        self._lock = threading.Lock()
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        """What only models that generate have."""
        if name.startswith("_") and not name.startswith("__"):
            raise encodes_only(self.info.name)
        raise AttributeError(name)

    @property
    def plan(self) -> MemoryPlan:
        return self._planned

    @property
    def info(self) -> ModelInfo:
        manifest, facts = self._facts.manifest, self._facts
        bits = round(manifest.bits_per_weight, 3)
        named = (manifest.name, manifest.architecture, manifest.parameters, bits, facts.backend, facts.kernel())
        return ModelInfo(*named, verified="now")

    @property
    def context(self) -> int:
        return self._encoder.context

    @property
    def in_memory(self) -> bool:
        return not self._closed

    @property
    def threads(self) -> int:
        return self._facts.threads

    @property
    def adapters(self) -> tuple[str, ...]:
        return ()

    @property
    def load_costs(self) -> LoadCosts:
        return self._costs

    @property
    def prompts(self) -> tuple[str, ...]:
        return tuple(self._use.prompts)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special, parse_special)

    def embed(
        self,
        texts: str | Sequence[Prompt],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Embeddings:
        if self.scores:
            raise CapabilityError(f"{self.info.name} scores documents.", "Use rerank(), or load a model that embeds.")
        listed = [texts] if isinstance(texts, str) else list(texts)
        before = prompt_of(self._use.prompts, self._use.default_prompt, prompt)
        encoded = self._encoded(
            [before + text if isinstance(text, str) else token_ids(text) for text in listed], truncate
        )
        with self._lock:
            self._require_open()
            vectors = self._encoder.evaluate(encoded)
        shortened = cut(vectors, dimensions)
        whole = normalized(shortened) if self._use.normalize or dimensions else shortened
        return Embeddings(whole, sum(len(text.ids) for text in encoded))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str = "",
        top_n: int | None = None,
        truncate: bool = False,
    ) -> Ranking:
        if not self.scores:
            hint = "Use embed() and compare vectors, or load a reranker."
            raise CapabilityError(f"{self.info.name} embeds texts and scores none.", hint)
        encoded = self._encoded([(query, document) for document in documents], truncate)
        with self._lock:
            self._require_open()
            scores = self._encoder.evaluate(encoded)[:, 0]
        return ranking(1 / (1 + np.exp(-scores.astype(np.float64))), sum(len(text.ids) for text in encoded), top_n)

    def _encoded(self, texts: Sequence[str | tuple[str, str] | list[int]], truncate: bool) -> list[Encoded]:
        """The tokens of texts, pairs, and texts that are token ids already, all short enough."""
        most, vocabulary = self.context, self._facts.manifest.geometry.vocab_size
        found: list[Encoded | None] = [None] * len(texts)
        said: list[tuple[int, str | tuple[str, str]]] = []
        for place, text in enumerate(texts):
            if isinstance(text, list):
                found[place] = Encoded(text[:most] if truncate else text, [0] * len(text[:most] if truncate else text))
            else:
                said.append((place, text))
        for place, text in said:
            if not all(isinstance(part, str) for part in (text if isinstance(text, tuple) else (text,))):
                raise PromptError(f"Text {place} is {shown(text)}, which is not a string.", "Pass strings.")
        for (place, _), row in zip(said, self._tokenizer.encode_several([text for _, text in said]), strict=True):
            found[place] = Encoded(*row)
        long = [(place, text) for place, text in said if len((found[place] or Encoded((), ())).ids) > most]
        if truncate and long:
            rows = self._tokenizer.encode_several([text for _, text in long], most)
            for (place, _), row in zip(long, rows, strict=True):
                found[place] = Encoded(*row)
        whole = [text for text in found if text is not None]
        for place, each in enumerate(whole):
            if len(each.ids) > most:
                message = f"Text {place} has {len(each.ids)} tokens, more than the {most} that the model takes."
                hint = "Split it, or pass truncate=True to leave out its end."
                raise ContextLengthError(message, hint, sizes=(len(each.ids), most))
            if not each.ids or not all(0 <= id_ < vocabulary for id_ in each.ids):
                message = f"Text {place} is empty, or has a token outside the vocabulary of {vocabulary}."
                raise PromptError(message, "Pass a text, or token ids of this model.")
        return whole

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.info.name} is closed.", "Load it again.")

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._encoder.close()
