"""Loading a model and asking it for text.

The way of the data: `load` has bundles opened and the parts of a model made (`loading`); `Model.stream` turns a prompt
into tokens and hands them to a `TokenStream`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edgeinfer.chat import Chat
from edgeinfer.config import GenerationConfig, LoadConfig
from edgeinfer.errors import ModelError, UsageError
from edgeinfer.generation import TokenStream
from edgeinfer.lifecycle import ModelLifecycle, resume, save
from edgeinfer.loading import Bundles, LoadRequest, make_parts
from edgeinfer.measured import TUNING_PROMPTS, Measured, TuneResult, tune_by
from edgeinfer.model_parts import ModelParts
from edgeinfer.openai import chat_completion
from edgeinfer.results import ExpertUse, LoadCosts, ModelInfo, Result
from edgeinfer.runtime.experts.statistics import ExpertCounts
from edgeinfer.runtime.kv_cache.session_file import SessionFile, open_session
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.sampling import check_grammar
from edgeinfer.runtime.system.allocation import allocating
from edgeinfer.runtime.text import ChatTemplate
from edgeinfer.tokenizing import chat_template
from edgeinfer.turns import Turns

__all__ = ["MemoryPlan", "Model", "TokenStream", "TuneResult", "load", "plan"]


def load(
    model: str | Path | None = None,
    *,
    memory: int | str | None = None,
    context: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Model:
    """Loads a model.

    Args:
        model: a bundle directory or a hub id (ORG/NAME); None is the built-in model.
        memory: budget for the whole process, as bytes or text such as "600MB". What the caller leaves open is chosen so
            that the model runs as fast as it can within it.
        context: tokens of prompt plus reply; None is 2048 or the model's maximum, or less where the budget needs it.
        progress: called with a stage, steps done and steps in all while weights are converted or packed, which a device
            does once.
        options: other fields of LoadConfig.

    Raises:
        ModelError: the bundle is missing or damaged.
        NativeUnavailableError: the native kernel is required and cannot run here.
        StorageError: there is no place for converted weights.
        BudgetError: it does not fit `memory`; the error carries the breakdown and the smallest budget that would do.
        UsageError: an option is unknown or out of range.
    """
    started = time.perf_counter()
    config = LoadConfig.of(memory=memory, context=context, **options)
    with allocating("The model"):
        bundles = Bundles.open(model, config).within(config)

    def make(started: float, plan: MemoryPlan | None) -> ModelParts:
        return make_parts(LoadRequest(bundles, config, progress, started, plan))

    lifecycle = ModelLifecycle(make, started, config.idle_unload, aside=config.remember)
    return Model(lifecycle, chat_template(bundles.target))


def plan(model: str | Path | None = None, **options: Any) -> MemoryPlan:
    """What `load` with the same arguments would take and run at, without loading, and the ways around it.

    A plan that does not fit is returned too.

    Args:
        options: fields of LoadConfig, sizes also as text.

    Raises:
        ModelError, UsageError: as `load`.
    """
    config = LoadConfig.of(**options)
    return Bundles.open(model, config).plan(config, all_ways=True)


class Model(Measured):
    """A loaded model. It holds one KV cache, so it runs one reply at a time, and others wait (`TokenStream.pause`);
    what a prompt shares with the one before is not evaluated again."""

    def __init__(self, lifecycle: ModelLifecycle, template: ChatTemplate | None) -> None:
        super().__init__(lifecycle, template)
        self._turns = Turns()

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan in force."""
        return self._lifecycle.facts.plan

    @property
    def info(self) -> ModelInfo:
        """Which model this is."""
        return self._lifecycle.facts.info

    @property
    def context(self) -> int:
        """Tokens of prompt plus reply."""
        return self._lifecycle.facts.plan.context

    @property
    def threads(self) -> int:
        """How many threads a pass works with."""
        return self._lifecycle.facts.threads

    @property
    def experts(self) -> ExpertUse | None:
        """How the tokens so far used experts, since the model was last loaded; None where it has none."""
        watched = self._parts.watched
        return None if watched is None else watched.use()

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The same as counts of tokens for each layer and expert; None where it has none."""
        watched = self._parts.watched
        return None if watched is None else watched.counts

    @property
    def load_costs(self) -> LoadCosts:
        """What loading took."""
        return self._lifecycle.facts.load

    @property
    def begin_ids(self) -> list[int]:
        """The begin token, in a list; empty where the model has none."""
        return list(self._lifecycle.facts.begin_ids)

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a reply, ascending."""
        return sorted(self._lifecycle.facts.end_ids)

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
        if isinstance(prompt, str):
            prompt = self.tokenize_prompt(prompt, parse_special=config.parses_prompt)
        return self._start(list(prompt), config, started, continues=True)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        """Continues a prompt and returns the whole reply; arguments and errors as `stream`."""
        return self.stream(prompt, **options).complete()

    def check(self, **options: Any) -> None:
        """Refuses generation options that no reply can be given. A hostile schema or grammar takes some seconds to be
        found out, which a reply with the same options then need not take again. Safe from any thread.

        Args:
            options: fields of GenerationConfig.

        Raises:
            UsageError: an option is unknown or out of range, or a schema or grammar is too large, or takes too much.
        """
        check_grammar(GenerationConfig().replace(**options))

    def chat(self, system: str | None = None) -> Chat:
        """A conversation, optionally with a system message."""
        return Chat(self, system)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        begun: str = "",
        tokens: Sequence[int] | None = None,
        on_finish: Callable[[Result], None] | None = None,
        **options: Any,
    ) -> TokenStream:
        """Answers OpenAI-style messages, chunk by chunk.

        Args:
            messages: mappings with "role" and "content".
            tools: functions that the model's chat template tells it of, as OpenAI shapes them.
            variables: further names for the template, such as enable_thinking.
            begun: what the reply already says; the stream goes on behind it.
            tokens: what `tokenize_chat` gives for all that, where it was asked before.
            on_finish: called once with the result, also when the reply is cut short.
            options: fields of GenerationConfig.

        Raises:
            TemplateError: the model has no chat template, or its template rejects the messages.
            UsageError, PromptError, ContextLengthError: as `stream`.
        """
        started = time.perf_counter()
        config = GenerationConfig().replace(**options)
        if tokens is None:
            tokens = self.tokenize_chat(
                messages,
                tools=tools,
                variables=variables,
                begun=begun,
                parse_special=config.parses_content,
                fitting=True,
            )
        return self._start(list(tokens), config, started, continues=bool(begun), on_finish=on_finish)

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
        options = {"granularity": granularity, "evaluations": evaluations, "seed": seed, "progress": progress}
        with self._idle() as parts:
            texts = [self.tokenize(prompt) for prompt in (TUNING_PROMPTS if prompts is None else prompts)]
            try:
                result = tune_by(texts, self.generate, parts.engine.backend, **options)
            finally:
                parts.engine.forget()
            parts.speculator.tuned(result.tuning)
        return result

    def unload(self) -> None:
        """Frees the model's memory; the next request loads it again, by the same plan, and goes on with the same text.

        Raises:
            UsageError: another thread is running a reply, or one is paused.
        """
        with self._turns.work():
            if self._turns.paused:
                raise UsageError("A paused reply needs the model.", "Finish or close its stream first.")
            self._lifecycle.unload()
        if self._template is not None:
            self._template.close()

    def close(self) -> None:
        """Frees the model; it is unusable afterwards. Replies of other threads end as "cancelled"; what else another
        thread does with it ends first, and the last of that frees it."""
        self._lifecycle.shut()
        self._turns.close()
        self._lifecycle.close()
        if self._template is not None:
            self._template.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load_chat(self, path: str | Path) -> Chat:
        """A conversation saved with `Chat.save`, to go on with this model; errors as `Chat.open`."""
        return Chat.open(self, path)

    def save_session(self, path: str | Path, tokens: Sequence[int] | None = None, text: str = "") -> None:
        """Writes what the cache holds to a file, for `load_session` to go on without evaluating it again.

        Args:
            tokens: of a prompt; only what both share is written. None writes all.
            text: kept in the file.

        Raises:
            StorageError: the path cannot be written.
        """
        with self._idle() as parts:
            save(parts, Path(path), tokens, text)

    def load_session(self, path: str | Path) -> list[int]:
        """Takes over what `save_session` wrote; the token ids it is of. What was made in another way is made again.

        Raises:
            UsageError: the file is missing, damaged or no session file.
            ModelError: it is another model's.
        """
        with open_session(Path(path)) as session, self._idle() as parts:
            if session.origin.model != parts.origin.model:
                message = f"{path} was written by another model than {self.info.name}."
                raise ModelError(message, "Load the model it was written by.")
            resume(parts, session)
            return list(session.tokens)

    def resume(self, session: SessionFile) -> bool:
        """Takes over the rows of an open session file, if they are this model's; whether they were."""
        with self._idle() as parts:
            return resume(parts, session)

    @allocating("The reply")
    def _start(
        self,
        prompt: list[int],
        config: GenerationConfig,
        started: float,
        *,
        continues: bool,
        on_finish: Callable[[Result], None] | None = None,
    ) -> TokenStream:
        self._turns.require_idle()

        def finished(result: Result) -> None:
            self._lifecycle.leave()
            if on_finish is not None:
                on_finish(result)

        parts = self._lifecycle.take()
        try:
            parts.engine.check(prompt)
            return TokenStream(
                parts, prompt, config, self._turns, on_finish=finished, continues=continues, started=started
            )
        except BaseException:
            self._lifecycle.leave()
            raise

    def _require_idle(self) -> None:
        self._turns.require_idle()

    def _alone(self) -> AbstractContextManager[None]:
        return self._turns.work()
