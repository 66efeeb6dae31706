"""Renders a conversation with a model's chat template, as transformers does."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.core.errors import PromptError, TemplateError
from edgeinfer.runtime.text.fitting import AS_GIVEN, Form, ProbeConversation, forms

if TYPE_CHECKING:
    # They bring jinja2, which takes as long to import as a small model to load: who does not chat need not wait.
    from edgeinfer.runtime.text.render_process import RenderProcess
    from edgeinfer.runtime.text.rendering import Rendered, Rendering


MAX_SOURCE_CHARACTERS = 100_000  # the largest published templates have some 30,000
MAX_GIVEN_BYTES = 8_000_000  # of messages, tools and variables: several times the longest contexts
_MAX_INTEGER_BITS = 4096
_MAX_DEPTH = 64  # of nested values in messages and tools
_VALUE_BYTES = 64  # of a value besides its text
_MOST_SHAPES = 256  # of conversations whose forms are remembered
# What `strftime_now` knows, each also without its leading zero, as "%-d".
_DIRECTIVES = "aAbBcdDeFfGgHhIjklMmpPRsSTuUVwWxXyYzZ"

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Variables = Mapping[str, Any] | None
# What gpt-oss's template calls a message's thought.
_THINKING = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]")


class ChatTemplate:
    """A chat template, for any number of threads.

    Templates come with models and are not trusted. They are rendered in jinja2's sandbox; a template whose text is not
    known in a process of its own, with limits of memory and time, which can be ended whatever it does. Frozen
    applications have no interpreter to start: there it is rendered in this process, without these limits.

    Args:
        source: jinja2 text.
        special_tokens: names to texts that the template may use, such as bos_token.
        now: the clock behind `strftime_now`.
        tool_source: jinja2 text of conversations with tools, where those have a template of their own.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        tool_source: str | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError(
                f"The chat template is too large ({len(source)} characters).",
                f"The limit is {MAX_SOURCE_CHARACTERS} characters.",
            )
        self.source = source
        # The template of conversations with tools; None where it is this one.
        self.tool_use = None if tool_source is None else ChatTemplate(tool_source, special_tokens, now)
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._forms: dict[bytes, Form | TemplateError] = {}  # by shape of conversation
        self._process: RenderProcess | None = None
        self._rendering: Rendering | None = None
        if not is_known(source):
            self._make_ready()

    def _make_ready(self) -> None:
        """Compile the template, or set up its process. Known templates are compiled at their first use."""
        from edgeinfer.runtime.text.render_process import RenderProcess, can_start
        from edgeinfer.runtime.text.rendering import RenderError, Rendering, check_syntax

        try:
            if is_known(self.source) or not can_start():
                self._rendering = Rendering(self.source)
            else:
                check_syntax(self.source)
                self._process = RenderProcess(self.source)
        except RenderError as error:
            hint = "Fix chat_template.jinja or export the model again."
            raise TemplateError(f"The chat template {error.what}: {error.reason}.", hint) from error

    @property
    def process(self) -> RenderProcess | None:
        """The process that renders the template; None if this one does."""
        return self._process

    def close(self) -> None:
        """End the template's process, if there is one; the next render starts another."""
        if self.tool_use is not None:
            self.tool_use.close()
        if self._process is not None:
            self._process.close()

    def render(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools = None, variables: Variables = None
    ) -> str:
        """Render a conversation as the model was trained on it, in the form that `fitted` finds. Messages have a str
        `role` and a `content` that is a str or a list of text parts, or None where there are `tool_calls`."""
        if tools and self.tool_use is not None:
            return self.tool_use.render(messages, add_generation_prompt, tools, variables)
        messages, tools = self.fitted(messages, add_generation_prompt, tools, variables)
        return self.rendered(messages, add_generation_prompt, tools, variables)

    def fitted(
        self, messages: Messages, add_generation_prompt: bool, tools: Tools, variables: Variables
    ) -> tuple[Messages, Tools]:
        """Messages and tools in the form that the template renders whole, with the least changes."""
        if (variables or {}).get("documents") and "documents" not in self.source:
            raise TemplateError("The chat template takes no documents.", "Put their texts into a message.")
        conversation = _conversation(messages)
        if "reasoning_content" not in self.source and _THINKING.search(self.source):
            for message in conversation:
                if "reasoning_content" in message:
                    message["thinking"] = message.pop("reasoning_content")
        probe = ProbeConversation.of(conversation, tools)
        key = hashlib.sha256(f"{probe.key} {add_generation_prompt} {variables!r}".encode("utf-8", "surrogatepass"))
        found = self._forms.get(key.digest())
        if found is None:
            found = self._form_of(probe, add_generation_prompt, variables)
            if len(self._forms) >= _MOST_SHAPES:
                self._forms.clear()
            self._forms[key.digest()] = found
        if isinstance(found, Form):
            return found.of(conversation), [] if found.listed else tools
        raise TemplateError(found.message, found.hint)

    def rendered(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools = None, variables: Variables = None
    ) -> str:
        """Render messages that are `fitted` already."""
        names = self._names(messages, add_generation_prompt, tools, variables)
        outcome = self._outcomes([names])[-1]
        if outcome.text is None:
            raise _failure(*outcome.failure)
        return outcome.text

    def _form_of(
        self, probe: ProbeConversation, add_generation_prompt: bool, variables: Variables
    ) -> Form | TemplateError:
        def outcomes(tried: Sequence[Form]) -> list[Rendered]:
            made = [(form.of(probe.messages), [] if form.listed else probe.tools) for form in tried]
            given = [self._names(each, add_generation_prompt, tools, variables) for each, tools in made]
            return self._outcomes(given, tuple(probe.texts))

        first = outcomes([AS_GIVEN])[-1]
        if first.whole:
            return AS_GIVEN
        lists = probe.tools is None and "tools" in self.source
        others = [] if first.spent else list(forms(probe.messages, parts=self._takes_parts, lists=lists))
        tried = outcomes(others) if others else [first]
        if tried[-1].whole:
            return others[len(tried) - 1]
        rendered = [each for each in (first, *tried) if each.text is not None]
        if not rendered:
            return _failure(*first.failure)
        lost = probe.texts[min((each.missing for each in rendered), key=len)[0]]
        message = f"The chat template leaves out {lost}, in every form that was tried."
        return TemplateError(message, "Leave it out, or take a model whose template knows it.")

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template prints a user's text only if it is a list of parts."""
        asked = ProbeConversation.of([{"role": "user", "content": "text"}], None)
        given = [self._names(Form(content).of(asked.messages), True, None, None) for content in ("text", "parts")]
        outcomes = self._outcomes(given, tuple(asked.texts))
        return len(outcomes) == len(given) and outcomes[-1].whole

    def _names(
        self, messages: Messages, add_generation_prompt: bool, tools: Tools, variables: Variables
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "documents": None,
            **{str(name): _plain(value, str(name)) for name, value in (variables or {}).items()},
            "messages": messages,
            "tools": None if tools is None else [_plain(tool, "tools") for tool in tools],
            "add_generation_prompt": bool((variables or {}).get("add_generation_prompt", add_generation_prompt)),
        }

    def _outcomes(self, attempts: Sequence[dict[str, Any]], probes: Sequence[str] = ()) -> list[Rendered]:
        """Render attempts up to the first whose text has all probes."""
        from edgeinfer.runtime.text.render_process import RenderProcessError

        given = max(map(_size, attempts))
        if given > MAX_GIVEN_BYTES:
            raise PromptError(
                f"The messages are too long ({given} bytes).", f"The limit is {MAX_GIVEN_BYTES} bytes; shorten them."
            )
        moment = _moment(self._now()) if "strftime_now" in self.source else {}
        if self._process is None and self._rendering is None:
            self._make_ready()
        if self._process is None:
            assert self._rendering is not None
            return self._rendering.render(attempts, moment, probes)
        try:
            return self._process.ask({"attempts": attempts, "moment": moment, "probes": probes})
        except RenderProcessError as error:
            raise _failure("failed", str(error)) from error


def _failure(what: str, reason: str) -> TemplateError:
    return TemplateError(
        f"The chat template {what}: {reason}.",
        "Check the messages against what the model's template allows, or take its makers' own template.",
    )


def _moment(now: datetime) -> dict[str, str]:
    """Format the moment by each of `strftime`'s directives."""
    parts = {"%": "%"}
    for directive in (prefix + letter for prefix in ("", "-") for letter in _DIRECTIVES):
        try:
            parts[directive] = now.strftime(f"%{directive}")
        except ValueError:  # not known to this system
            continue
    return parts


def _size(value: Any) -> int:
    """Estimate the bytes of plain values."""
    if isinstance(value, str):
        return _VALUE_BYTES + len(value) * (1 if value.isascii() else 4)
    if isinstance(value, dict):
        return _VALUE_BYTES + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return _VALUE_BYTES + sum(map(_size, value))
    return _VALUE_BYTES


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError(
            "The messages are not a non-empty list.", 'Give a list such as [{"role": "user", "content": "Hello"}].'
        )
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(
            f"Message {index} is not a mapping with a string 'role'.", "Give each message role and content."
        )
    plain: dict[str, Any] = _plain(message, f"message {index}")
    content = plain.get("content")
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                problem = f"Message {index} has a part that is not text."
                raise PromptError(problem, 'Parts look like {"type": "text", "text": "..."}.')
    elif not isinstance(content, str) and not (content is None and plain.get("tool_calls")):
        raise PromptError(
            f"The content of message {index} is {type(content).__name__}, not text.",
            "Give a str or a list of text parts.",
        )
    plain.setdefault("content", None)
    calls = plain.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        hint = 'Calls look like {"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        raise PromptError(f"The tool_calls of message {index} are no list of calls.", hint)
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Copy a value as JSON types: templates see no objects with methods."""
    if depth > _MAX_DEPTH:
        raise PromptError(f"The {where} nest more than {_MAX_DEPTH} levels deep.", "Flatten them.")
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise PromptError(f"The {where} contain a number of more than {_MAX_INTEGER_BITS} bits.", "Give it as text.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(_plain(key, where, depth + 1)): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise PromptError(f"The {where} contain a {type(value).__name__}, which is not JSON.", "Use JSON types only.")


def is_known(source: str) -> bool:
    """Whether a template is that of the built-in model or one that llama.cpp publishes in models/templates."""
    return hashlib.sha256(source.rstrip().encode("utf-8", "surrogatepass")).hexdigest() in _known()


@cache
def _known() -> Mapping[str, str]:
    """Known templates: the SHA-256 of the UTF-8 text without the white space at its end, and whose template it is."""
    known: dict[str, str] = json.loads(Path(__file__).with_name("known_templates.json").read_text("utf-8"))
    return known
