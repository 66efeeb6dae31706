"""A loaded model but for its replies: its facts, its tokenizer and chat template, and sessions kept in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.batching import Turns
from edgeinfer.core.errors import ModelError, PromptError, TemplateError, shown
from edgeinfer.core.results import ExpertUse, LoadCosts, ModelInfo
from edgeinfer.lifecycle import ModelLifecycle, ModelParts, resume, save
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.kv_cache.session_file import SessionFile, open_session
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.text.contract import bytes_of
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.tokenizing import known_ids, require_fitting_messages, require_fitting_text

if TYPE_CHECKING:
    from edgeinfer.runtime.text.special_tokens import GuardedTemplate
    from edgeinfer.runtime.tuning.measure import TokenScores


class LoadedModel:
    """A model's facts, tokenizer and sessions; `Model` adds replies. `template` is None where there is none."""

    def __init__(self, lifecycle: ModelLifecycle, template: ChatTemplate | None) -> None:
        self._lifecycle = lifecycle
        self._template = template
        self._guarded: GuardedTemplate | None = None
        self._turns = Turns()

    def __repr__(self) -> str:
        info = self.info
        kept = f"{info.bits_per_weight:.1f} bits, context {self.context}, {info.backend} on {info.device}"
        return f"<{type(self).__name__} {info.name}: {kept}>"

    @property
    def _parts(self) -> ModelParts:
        return self._lifecycle.parts()

    @contextmanager
    def _idle(self) -> Iterator[ModelParts]:
        """The parts, reserved and kept in memory inside the block; no reply runs."""
        with self._turns.work(), self._lifecycle.acquire() as parts:
            yield parts

    @property
    def plan(self) -> MemoryPlan:
        """The current memory plan."""
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
    def digest(self) -> str:
        """The sha256 of weights and decoder, in hexadecimal digits: it identifies the model wherever it is stored."""
        return self._lifecycle.facts.digest

    @property
    def vocabulary_digest(self) -> str:
        """The sha256 of the text of each token id: equal for models with the same vocabulary."""
        return self._parts.vocabulary_digest

    @property
    def in_memory(self) -> bool:
        """Whether the model is in memory now; if not, the next request loads it again."""
        return self._lifecycle.in_memory

    def reload(self) -> None:
        """Load the model again now, if it was unloaded, as the next request would; that tries again after an error."""
        self._lifecycle.parts()

    @property
    def threads(self) -> int:
        """How many threads a pass uses."""
        return self._lifecycle.facts.threads

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that replies can be made with."""
        return self._lifecycle.facts.adapters

    def require_contexts(self) -> None:
        """Refuse a model that cannot evaluate contexts separately (CapabilityError), before any text is read."""
        from edgeinfer.runtime.decoding.contexts import require_contexts

        with self._lifecycle.acquire(verified=False) as parts:
            require_contexts(parts.sequence, parts.decoder)

    @property
    def experts(self) -> ExpertUse | None:
        """How the tokens so far used experts since the model was last loaded; None where it has none."""
        watched = self._parts.watched
        return None if watched is None else watched.use()

    @property
    def load_costs(self) -> LoadCosts:
        """The time and memory that loading took."""
        return self._lifecycle.facts.load

    @property
    def begin_ids(self) -> list[int]:
        """The begin token, in a list; empty where the model has none."""
        return list(self._lifecycle.facts.begin_ids)

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Generation options that the model's makers recommend. Chats use them unless the caller gives others."""
        return self._lifecycle.facts.sampling

    @property
    def prefix_ids(self) -> list[int]:
        """The tokens that `tokenize` puts before every text: the begin token, or nothing where it adds none."""
        begin = self.begin_ids
        return begin if begin and self.tokenize("a")[: len(begin)] == begin else []

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a reply, ascending."""
        return sorted(self._lifecycle.facts.end_ids)

    def logits(self, tokens: Sequence[int], adapter: str | None = None) -> Iterator[Floats]:
        """The logits after each token of a text, in arrays of a few rows (R, V); each overwrites the one before.
        Empties the cache; the model must not be used for anything else before the last array."""
        self._turns.require_idle()

        def rows(logits: Iterator[Floats]) -> Iterator[Floats]:
            with self._idle():
                yield from logits

        with self._lifecycle.acquire() as parts:
            from edgeinfer.runtime.tuning.measure import token_logits

            parts.sequence.use_adapter(adapter)
            return rows(token_logits(parts.sequence, tokens))

    def score(self, tokens: Sequence[int], adapter: str | None = None) -> TokenScores:
        """Log-probabilities of a text, and the likeliest token after each of its tokens; empties the cache."""
        from edgeinfer.runtime.tuning.measure import score_tokens

        with self._idle() as parts:
            parts.sequence.use_adapter(adapter)
            return score_tokens(parts.sequence, tokens)

    def save_session(self, path: str | Path, tokens: Sequence[int] | None = None, text: str = "") -> None:
        """Write the contents of the cache to a file, from which `load_session` continues without evaluating it again.

        Args:
            tokens: write only the common prefix with these; None writes all.
            text: any text to keep in the file.

        Raises:
            StorageError: the path cannot be written.
        """
        with self._idle() as parts:
            save(parts, Path(path), tokens, text)

    def load_session(self, path: str | Path) -> list[int]:
        """Take over what `save_session` wrote and return its token ids. Rows from other settings are computed again.
        UsageError where the file is missing, damaged or no session file; ModelError where it is another model's."""
        with open_session(Path(path)) as session, self._idle() as parts:
            if session.origin.model != parts.origin.model:
                message = f"{path} was written by another model than {self.info.name}."
                raise ModelError(message, "Load the model it was written by.")
            resume(parts, session)
            return list(session.tokens)

    def resume(self, session: SessionFile) -> bool:
        """Take over the rows of an open session file, if they are this model's; return whether they were."""
        with self._idle() as parts:
            return resume(parts, session)

    @property
    def tokenizes_concurrently(self) -> bool:
        """Whether other threads may tokenize texts while a reply is made."""
        return self._lifecycle.facts.tokenizes_concurrently

    @property
    def chat_template_text(self) -> str | None:
        """The source of the model's chat template; None where it has none."""
        return None if self._template is None else self._template.source

    @property
    def tool_template_text(self) -> str | None:
        """The source of the template for conversations with tools, which may be a separate one."""
        own = None if self._template is None else self._template.tool_use
        return self.chat_template_text if own is None else own.source

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: add the tokens that the tokenizer puts around a text, such as a begin token.
            parse_special: special tokens spelled out in the text become those tokens; False takes it as plain text.

        Raises:
            PromptError: the text is no string, or no valid Unicode.
        """
        if not isinstance(text, str):
            raise PromptError(f"The text is {shown(text)}, which is not a string.", "Pass a string.")
        with self._lifecycle.acquire(verified=False) as parts:
            if parse_special:
                return parts.tokenizer.encode(text, add_special)
            return parts.literal_encoder.literal(text, add_special)

    def tokenize_data(self, text: str, *, fitting: str = "") -> list[int]:
        """Token ids of a text inside another: without a begin token, and without special tokens that it spells out.
        With a name for errors in `fitting`, ContextLengthError where it is far too long for the context."""
        with self._lifecycle.acquire(verified=False) as parts:
            if fitting:
                require_fitting_text(parts, text, fitting)
            return parts.literal_encoder.literal(text)

    def tokenize_prompt(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text to continue; PromptError or ContextLengthError where it is empty, or far too long."""
        if isinstance(text, str) and not text:
            raise PromptError("The prompt is empty.", "Give some text to continue.")
        with self._lifecycle.acquire(verified=False) as parts:
            require_fitting_text(parts, text)
            return self.tokenize(text, add_special=add_special, parse_special=parse_special)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        prefill: str = "",
        parse_special: bool = False,
        fitting: bool = False,
    ) -> list[int]:
        """Token ids of OpenAI-style messages in the model's chat template, up to the start of the reply.

        Args:
            tools, variables, prefill: as `Model.stream_chat` takes them.
            parse_special: special tokens spelled out in these become those tokens, and not only the template's own.
            fitting: refuse messages that are far too long for the context before all of them are tokenized.

        Raises:
            TemplateError, ContextLengthError: as `Model.stream_chat`, the latter for what is not `fitting`.
        """
        template = self._require_template()
        with self._lifecycle.acquire(verified=False) as parts:
            if fitting:
                require_fitting_messages(parts, messages)
            if parse_special:
                text = template.render(messages, add_generation_prompt=True, tools=tools, variables=variables) + prefill
            else:
                from edgeinfer.runtime.text.special_tokens import GuardedTemplate  # with jinja2, which chats need

                # Kept for its analysis of the template, which stays valid when the model is loaded again.
                self._guarded = self._guarded or GuardedTemplate(template, parts.literal_encoder.special_tokens)
                pieces = self._guarded.parts(messages, tools, variables, prefill)
                text = "".join(pieces)
            if fitting:
                require_fitting_text(parts, text)
            if parse_special:
                return parts.tokenizer.encode(text, add_special_tokens=False)
            return parts.literal_encoder.encode_parts(pieces)

    def split_chat(self, messages: Sequence[Mapping[str, Any]], prefill: str = "") -> tuple[list[int], list[int]]:
        """Token ids of messages and prefill, split where the text of the first user message starts; TemplateError where
        the template does not write that text as it is."""
        template = self._require_template()
        mark = "[contexts]"
        while any(mark in str(each) for each in messages):
            mark += "]"
        users = [place for place, each in enumerate(messages) if each.get("role") == "user"]
        marked = list(map(dict, messages))
        for place in users[:1]:
            content = marked[place].get("content")
            texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
            marked[place]["content"] = "".join([mark, *texts])
        with self._lifecycle.acquire(verified=False) as parts:
            require_fitting_messages(parts, messages)
            from edgeinfer.runtime.text.special_tokens import GuardedTemplate

            self._guarded = self._guarded or GuardedTemplate(template, parts.literal_encoder.special_tokens)
            pieces = self._guarded.parts(marked, None, None, prefill)
            require_fitting_text(parts, "".join(pieces))
            here = [place for place, piece in enumerate(pieces) if mark in piece]
            if len(here) != 1:
                message = "The chat template does not write the first message as it is."
                raise TemplateError(message, "Use generate() with plain text.")
            before, behind = pieces[here[0]].split(mark, 1)
            encoder = parts.literal_encoder
            return encoder.encode_parts([*pieces[: here[0]], before]), encoder.encode_parts(
                [behind, *pieces[here[0] + 1 :]]
            )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render OpenAI-style messages with the model's chat template.

        Used as a prompt, special tokens spelled out in messages become those tokens; `tokenize_chat` and `stream_chat`
        keep them text.

        Args:
            variables: as `Model.stream_chat` takes them; with "add_generation_prompt": False the text ends with the
                last message.

        Raises:
            TemplateError, ContextLengthError: as `Model.stream_chat`.
        """
        template = self._require_template()
        with self._lifecycle.acquire(verified=False) as parts:
            require_fitting_messages(parts, messages)
        return template.render(messages, add_generation_prompt=True, tools=tools, variables=variables)

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            message = f"{self._lifecycle.facts.info.name} has no chat template, so it cannot answer messages."
            raise TemplateError(message, "It continues texts: edgeinfer run, or generate() in Python.")
        return self._template

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; special tokens are left out unless `special`. PromptError where one is no id of the
        vocabulary."""
        with self._lifecycle.acquire(verified=False) as parts:
            return parts.tokenizer.decode(known_ids(parts, ids), skip_special_tokens=not special)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token, with special tokens spelled out; errors as `detokenize`."""
        with self._lifecycle.acquire(verified=False) as parts:
            return [bytes_of(parts.tokenizer, id_) for id_ in known_ids(parts, ids)]
