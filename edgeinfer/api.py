"""Loading a model and asking it for text; knows nothing of graphs, passes or how a bundle is made.

The way of the data: `load` has bundles opened and the parts of a model made (`loading`); `Model.stream` turns a prompt
into tokens and hands them to a `TokenStream`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edgeinfer.chat import Chat
from edgeinfer.config import GenerationConfig, LoadConfig, parse_size
from edgeinfer.errors import PromptError, TemplateError, UsageError
from edgeinfer.generation import ModelParts, TokenStream
from edgeinfer.loading import Bundles, make_parts
from edgeinfer.openai import chat_completion
from edgeinfer.results import LoadCosts, ModelInfo, PassWork, Result
from edgeinfer.runtime import measure
from edgeinfer.runtime.contracts import Floats
from edgeinfer.runtime.plan import MemoryPlan
from edgeinfer.runtime.text import ChatTemplate
from edgeinfer.text_files import chat_template
from edgeinfer.tuning import TUNING_PROMPTS, TuneResult, tune_by

__all__ = ["Model", "TokenStream", "TuneResult", "load", "plan"]


def load(
    model: str | Path | None = None,
    *,
    memory: int | str | None = None,
    context: int | None = None,
    threads: int | None = None,
    exact: bool = True,
    prefill_chunk: int = 64,
    backend: str | None = None,
    native: bool | None = None,
    speculation: str = "auto",
    draft_model: str | Path | None = None,
    draft_max: int | None = None,
    remember: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> Model:
    """Loads a model.

    Args:
        model: a bundle directory or a hub id (ORG/NAME); None is the built-in model.
        memory: budget for the whole process, as bytes or text such as "600MB".
        context: tokens of prompt plus reply; None is 2048 or the model's maximum.
        threads: of the linear algebra; None takes the physical cores.
        exact: make text independent of how passes are cut, bit for bit.
        prefill_chunk: prompt tokens per pass.
        backend: "onnx" or "reference"; None is the bundle's own.
        native: multiply by the native kernel: None where it works and the bundle stores its layout, False never, True
            always.
        speculation: who may draft tokens ahead: "auto", "off", or names such as "copy,recycle". It changes the speed,
            never the text.
        draft_model: a small model with the same tokenizer that drafts, as bundle directory or hub id.
        draft_max: tokens in a draft at most; None chooses.
        remember: keep what drafters learn (token ids and counts, no text) in this user's cache.
        progress: called with a stage, steps done and steps in all while weights are converted, which a device that
            cannot run a bundle's layout does once.

    Raises:
        ModelError: the bundle is missing or damaged.
        NativeUnavailableError: the native kernel is required and cannot run here.
        StorageError: there is no place for converted weights.
        BudgetError: it does not fit `memory`; the error carries the breakdown.
        UsageError: an option is out of range.
    """
    started = time.perf_counter()
    draft = None if draft_model is None else str(draft_model)
    budget = None if memory is None else parse_size(memory)
    drafting = (speculation, draft, draft_max, remember)
    config = LoadConfig(context, budget, threads, exact, prefill_chunk, backend, native, *drafting)
    bundles = Bundles.open(model, config)
    return Model(make_parts(bundles, config, progress, started), chat_template(bundles.target))


def plan(
    model: str | Path | None = None,
    *,
    memory: int | str | None = None,
    context: int | None = None,
    prefill_chunk: int = 64,
    native: bool | None = None,
    speculation: str = "auto",
    draft_model: str | Path | None = None,
    draft_max: int | None = None,
) -> MemoryPlan:
    """What `load` with the same arguments would take, without loading; a plan that does not fit is returned too.

    Raises:
        ModelError, UsageError: as `load`.
    """
    config = LoadConfig(
        context=context,
        memory=None if memory is None else parse_size(memory),
        prefill_chunk=prefill_chunk,
        native=native,
        speculation=speculation,
        draft_model=None if draft_model is None else str(draft_model),
        draft_max=draft_max,
    )
    return Bundles.open(model, config).plan(config)


class Model:
    """A loaded model. It holds one KV cache, so it runs one reply at a time; what a prompt shares with the one before
    is not evaluated again."""

    def __init__(self, parts: ModelParts, template: ChatTemplate | None) -> None:
        self._parts = parts
        self._template = template
        self._running: TokenStream | None = None

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan in force."""
        return self._parts.plan

    @property
    def info(self) -> ModelInfo:
        """Which model this is."""
        return self._parts.info

    @property
    def context(self) -> int:
        """Tokens of prompt plus reply."""
        return self._parts.plan.context

    @property
    def load_costs(self) -> LoadCosts:
        """What loading took."""
        return self._parts.load

    @property
    def begin_ids(self) -> list[int]:
        """The begin token, in a list; empty where the model has none."""
        return list(self._parts.begin_ids)

    def stream(self, prompt: str | Sequence[int], **options: Any) -> TokenStream:
        """Continues a prompt, chunk by chunk.

        Args:
            prompt: text, or token ids.
            options: fields of GenerationConfig.

        Raises:
            PromptError: the prompt is empty.
            ContextLengthError: it leaves no room for a reply.
            UsageError: an option is unknown or out of range, or another reply is running.
        """
        started = time.perf_counter()
        config = GenerationConfig().replace(**options)
        ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        return self._start(ids, config, started, continues=True)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        """Continues a prompt and returns the whole reply; arguments and errors as `stream`."""
        return self.stream(prompt, **options).complete()

    def chat(self, system: str | None = None) -> Chat:
        """A conversation, optionally with a system message."""
        return Chat(self, system)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        on_finish: Callable[[Result], None] | None = None,
        **options: Any,
    ) -> TokenStream:
        """Answers OpenAI-style messages, chunk by chunk.

        Args:
            messages: mappings with "role" and "content".
            on_finish: called once with the result, also when the reply is cut short.
            options: fields of GenerationConfig.

        Raises:
            TemplateError: the model has no chat template, or its template rejects the messages.
            UsageError, PromptError, ContextLengthError: as `stream`.
        """
        started = time.perf_counter()
        config = GenerationConfig().replace(**options)
        return self._start(self.tokenize_chat(messages), config, started, continues=False, on_finish=on_finish)

    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **options: Any
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """OpenAI's chat completion: a dict, or an iterator of chunk dicts with `stream=True`.

        Args:
            messages: OpenAI-style messages.
            options: OpenAI's request fields (max_tokens, temperature, stop, seed, ...).

        Raises:
            UsageError: a field edgeinfer does not support, besides what `stream_chat` raises.
        """
        return chat_completion(self, messages, stream=stream, **options)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, with the tokenizer's own begin token."""
        if not text:
            raise PromptError("The prompt is empty.", "Give some text to continue.")
        return self._parts.tokenizer.encode(text)

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of OpenAI-style messages in the model's chat template, up to where the reply begins.

        Raises:
            TemplateError: the model has no chat template, or its template rejects the messages.
        """
        if self._template is None:
            raise TemplateError(f"{self.info.name} has no chat template.", "Use generate() with plain text.")
        text = self._template.render(messages, add_generation_prompt=True)
        return self._parts.tokenizer.encode(text, add_special_tokens=False)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._parts.tokenizer.decode(ids)

    def measure_passes(self, sizes: Sequence[int], *, past: int, repeats: int) -> dict[int, list[float]]:
        """c(m): milliseconds of passes over m new tokens with m logit rows after `past` tokens; empties the cache."""
        self._require_idle()
        return measure.pass_times(self._parts.engine, sizes, past=past, repeats=repeats)

    def measure_prefill(self, tokens: int, *, repeats: int) -> list[float]:
        """Milliseconds of taking in a prompt of `tokens` tokens, chunk by chunk; empties the cache."""
        self._require_idle()
        return measure.prefill_times(self._parts.engine, tokens, repeats=repeats)

    def measure_decode(self, tokens: int, *, past: int) -> measure.DecodeTimes:
        """Per greedily decoded token, milliseconds inside the session and in all; empties the cache."""
        self._require_idle()
        return measure.decode_times(self._parts.engine, tokens, past=past)

    def pass_work(self, tokens: int, rows: int) -> PassWork:
        """What a pass over `tokens` new tokens with `rows` logit rows has to do, by the bundle's table of weights."""
        return measure.pass_work(self._parts.tensors, tokens, rows)

    def logits(self, tokens: Sequence[int]) -> Iterator[Floats]:
        """The logits after each token of a text, as arrays of a few rows each, which the next overwrites: (R, V).

        Empties the cache. Nothing else may be asked of the model before the last of them.
        """
        self._require_idle()
        return measure.token_logits(self._parts.engine, tokens)

    def score(self, tokens: Sequence[int]) -> measure.TokenScores:
        """Log-probabilities of a given text and the best next token after each of its tokens; empties the cache."""
        self._require_idle()
        return measure.score_tokens(self._parts.engine, tokens)

    def tune(
        self,
        prompts: Sequence[str] | None = None,
        *,
        granularity: int = 1,
        evaluations: int = 200,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> TuneResult:
        """Finds the layers of this model that can be skipped while drafting; what pays is kept, and used from now on.

        Args:
            prompts: texts whose replies tell how well skipping does; None takes a few of edgeinfer's own.
            granularity: consecutive layers that are skipped together.
            evaluations: sets of layers to try at most.
            progress: called with sets tried and to try.

        Raises:
            CapabilityError: the backend cannot skip layers.
            UsageError: a prompt has no reply to score by, or the context is too small.
        """
        self._require_idle()
        texts = [self.tokenize(prompt) for prompt in (TUNING_PROMPTS if prompts is None else prompts)]
        options = {"granularity": granularity, "evaluations": evaluations, "seed": seed, "progress": progress}
        try:
            result = tune_by(texts, self.generate, self._parts.engine.backend, **options)
        finally:
            self._parts.engine.forget()
        self._parts.speculator.tuned(result.tuning)
        return result

    def drafting_state(self) -> dict[str, Any]:
        """What drafters have learnt, to be put back by `restore_drafting` before another text is timed."""
        return self._parts.speculator.state()

    def restore_drafting(self, state: Mapping[str, Any]) -> None:
        """Puts back what `drafting_state` gave; an empty one makes drafters forget all."""
        self._require_idle()
        self._parts.speculator.restore(state)

    def close(self) -> None:
        """Frees the model; it is unusable afterwards."""
        if self._running is not None:
            self._running.close()
        self._parts.speculator.close()
        self._parts.engine.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load_chat(self, path: str | Path) -> Chat:
        """A conversation saved with `Chat.save`, to go on with this model; errors as `Chat.open`."""
        return Chat.open(self, path)

    def _start(
        self,
        prompt: list[int],
        config: GenerationConfig,
        started: float,
        *,
        continues: bool,
        on_finish: Callable[[Result], None] | None = None,
    ) -> TokenStream:
        self._require_idle()
        self._parts.engine.check(prompt)

        def finished(result: Result) -> None:
            self._running = None
            if on_finish is not None:
                on_finish(result)

        stream = TokenStream(self._parts, prompt, config, on_finish=finished, continues=continues, started=started)
        self._running = stream
        return stream

    def _require_idle(self) -> None:
        """Ends a reply that was left unfinished; one that another thread may be reading is not touched."""
        if self._running is None:
            return
        if not self._running.abandoned:
            raise UsageError("Another thread is running a reply of this model.", "Finish or close its stream first.")
        self._running.close()
