"""What a loaded model is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.records import dataclass
from edgeinfer.results import LoadCosts, ModelInfo
from edgeinfer.runtime.backends.wrapped import ExpertCountingBackend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.decoding.scheduler import SequenceBackend
from edgeinfer.runtime.kv_cache.session_file import Origin
from edgeinfer.runtime.planning.ledger import Ledger
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.sampling.choice_trie import ChoiceLists
from edgeinfer.runtime.speculation.company import SequenceDrafting
from edgeinfer.runtime.speculation.speculator import Speculator
from edgeinfer.runtime.text.contract import TokenizerLike, longest_token, vocabulary_digest
from edgeinfer.runtime.text.control_marks import LiteralEncoder
from edgeinfer.runtime.weights.verification import Verification

if TYPE_CHECKING:
    from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies
    from edgeinfer.runtime.remote.deciding import RemoteDeciding
    from edgeinfer.runtime.sampling.grammar_tokens import GrammarVocabulary


@dataclass(frozen=True)
class ModelParts:
    """What a loaded model is made of.

    Attributes:
        loaded: which model it is; `info` says besides whether its files are verified.
        verification: of the files it is made of; replies wait until they are verified.
        threads: that a pass works with.
        uncertainty: entropy in nats above which searches take the next token for uncertain, unless a reply says.
        watched: the backend where it has experts, which tells how they are used.
        decoder: what its layers are, where the bundle says it.
        sampling: generation options that its makers recommend for chats.
        main: of a reply beside others, the parts of the model itself.
        drafting: of a reply beside others, what drafts for its sequence.
        remote: how a server decides what this model drafts; None where this model decides.
    """

    engine: Engine
    tokenizer: TokenizerLike
    loaded: ModelInfo
    begin_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    load: LoadCosts
    tensors: tuple[TensorEntry, ...]
    origin: Origin
    speculator: Speculator
    make_reduced: Callable[[], ReducedComputeStrategies]
    ledger: Ledger
    verification: Verification
    threads: int
    uncertainty: float
    watched: ExpertCountingBackend | None = None
    decoder: DecoderSpec | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    main: ModelParts | None = None
    drafting: SequenceDrafting | None = None
    remote: RemoteDeciding | None = None

    def beside(self, engine: Engine, replies: Callable[[], int]) -> ModelParts:
        """The same model with the engine of another sequence, for a reply beside others."""
        drafting = SequenceDrafting(engine.backend, replies)
        return replace(self, engine=engine, watched=None, main=self, drafting=drafting)

    @property
    def info(self) -> ModelInfo:
        """Which model it is."""
        return replace(self.loaded, verified=self.verification.outcome)

    @property
    def company(self) -> int:
        """Sequences that shared the last pass."""
        backend = self.engine.backend
        return backend.company if isinstance(backend, SequenceBackend) else 1

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan in force."""
        return self.ledger.plan

    @cached_property
    def reduced(self) -> ReducedComputeStrategies:
        """What makes the strategies of replies that take less compute."""
        return self.make_reduced()

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """The vocabulary as replies by a grammar need it, with memory planned for it."""
        if self.main is not None:
            return self.main.grammar_vocabulary
        from edgeinfer.runtime.sampling.grammar_tokens import GrammarVocabulary  # of few replies

        self.ledger.plan_grammars()
        sliced = self.plan.configuration.grammars == "sliced"
        return GrammarVocabulary(self.tokenizer, self.engine.backend.geometry.vocab_size, sliced=sliced)

    @cached_property
    def choice_lists(self) -> ChoiceLists:
        """The lists of choices that replies had last."""
        if self.main is not None:
            return self.main.choice_lists
        return ChoiceLists(self.tokenizer, self.literal_encoder, self.engine.backend.geometry.vocab_size)

    @cached_property
    def literal_encoder(self) -> LiteralEncoder:
        """The tokenizer for texts that must not become control tokens."""
        if self.main is not None:
            return self.main.literal_encoder
        return LiteralEncoder(self.tokenizer, self.eos_ids)

    @cached_property
    def vocabulary_digest(self) -> str:
        """The sha256 of what each token id stands for."""
        return vocabulary_digest(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of text that one token stands for at most."""
        return longest_token(self.tokenizer)
