"""How models write function calls, replies split into text and calls while they are written, and replies' figures."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any, Protocol

from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Chunk, Result, TokenLogprob

_ID_LENGTH = 24


@dataclass(frozen=True)
class ToolFormat:
    """A format: `prefix`, calls with `between` in between, `suffix`, each call an object of `name` and arguments."""

    name: str
    signs: tuple[str, ...]  # texts in a chat template, any of which says that its model uses this format
    marker: str  # the start of `prefix` and a first call, which distinguishes a call from text. May be a special token.
    prefix: str
    between: str
    suffix: str
    anywhere: bool = True  # whether text may precede the marker; else it only counts at the very start
    key: str = "arguments"  # name of the arguments
    several: bool = True  # whether the models' templates know replies of more than one call
    id_length: int = 0  # letters and digits of an id, where templates insist on it; 0 is OpenAI's
    others: tuple[str, ...] = ()  # texts in a chat template, any of which says that it does not, in spite of the signs

    def known_by(self, template: str) -> bool:
        return any(sign in template for sign in self.signs) and not any(sign in template for sign in self.others)

    def head(self, function: str) -> str:
        """The text before the arguments of a call."""
        return f'{{"name": {json.dumps(function)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """The text after the arguments."""
        return "}"

    def new_id(self) -> str:
        if self.id_length:
            return secrets.token_hex(self.id_length)[: self.id_length]
        return f"call_{secrets.token_hex(_ID_LENGTH // 2)}"

    def fitted_id(self, id_: str) -> str:
        """A client's id of a call, changed to the form that templates of this format take."""
        if not self.id_length or (len(id_) == self.id_length and id_.isascii() and id_.isalnum()):
            return id_
        return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[: self.id_length]


HERMES = ToolFormat(
    name="hermes",
    signs=("<tool_call>",),
    marker="<tool_call>",
    prefix="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    suffix="\n</tool_call>",
    # Qwen3-Coder and GLM write arguments as XML elements.
    others=("<function=", "<arg_key>"),
)
LLAMA3 = ToolFormat(
    name="llama3",
    signs=("<|python_tag|>", '"parameters": dictionary'),
    marker='{"name": "',
    prefix="",
    between="; ",
    suffix="",
    anywhere=False,
    key="parameters",
    # "This model only supports single tool-calls at once!", its template says.
    several=False,
)


MISTRAL = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    marker="[TOOL_CALLS]",
    prefix="[TOOL_CALLS][",
    between=", ",
    suffix="]",
    # "Tool call IDs should be alphanumeric strings with length 9!", its templates say.
    id_length=9,
    # Later models write [TOOL_CALLS]name[ARGS]{...}.
    others=("[ARGS]",),
)


FORMATS = {form.name: form for form in (HERMES, MISTRAL, LLAMA3)}
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class Dialect:
    """How functions are described to a model, and how it calls them."""

    format: ToolFormat
    native: bool  # its template knows functions; else the system message describes them


def dialect_of(template: str | None) -> Dialect:
    """The dialect of a chat template's model; Hermes' in messages where the template has no format known here."""
    if template is not None and _TOOLS.search(template):
        for form in FORMATS.values():
            if form.known_by(template):
                return Dialect(form, native=True)
    return Dialect(HERMES, native=False)


@dataclass(frozen=True)
class TextPiece:
    text: str


@dataclass(frozen=True)
class CallPiece:
    """The start of a call."""

    place: int  # index of the call in the reply
    id: str  # the answer to the call names it
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """Some of a call's arguments, which together are a JSON object."""

    place: int
    text: str


Piece = TextPiece | CallPiece | ArgumentsPiece


class ReplyReader(Protocol):
    """Splits the chunks of one reply into text and calls."""

    def push(self, chunk: Chunk) -> list[Piece]:
        """Pieces that became certain with a chunk."""

    def finish(self) -> list[Piece]:
        """Pieces that were held back, at the end of the reply."""

    @property
    def in_call(self) -> bool:
        """Whether a call has started whose arguments are not complete."""


class PlainReader:
    """Reads replies that are only text."""

    def push(self, chunk: Chunk) -> list[Piece]:
        return [TextPiece(chunk.text)] if chunk.text else []

    def finish(self) -> list[Piece]:
        return []

    @property
    def in_call(self) -> bool:
        return False


class CallReader:
    """Reads replies that may hold calls in one format. Text that turns out to be no call stays text."""

    def __init__(self, form: ToolFormat, marker_id: int | None = None) -> None:
        self._form = form
        self._marker_id = marker_id  # of a marker that is a special token, which has no text
        # The text before arguments, with the function's name as its group.
        before, _, behind = form.head("NAME").partition("NAME")
        self._head = re.compile(re.escape(before) + r"([^\"\\]*)" + re.escape(behind))
        self._buffer = ""
        self._state: Callable[[], list[Piece] | None] = self._in_text
        self._said = False  # whether any text was given
        self._place = -1
        self._value = _ObjectEnd()

    def push(self, chunk: Chunk) -> list[Piece]:
        if self._marker_id is not None and self._marker_id in chunk.token_ids:
            # The text of a chunk comes after its token.
            self._buffer += self._form.marker
        self._buffer += chunk.text
        return self._read()

    def finish(self) -> list[Piece]:
        left, self._buffer = self._buffer, ""
        # A call that was cut short has nothing to add to its arguments, which were given.
        return [TextPiece(left)] if left and self._state in (self._in_text, self._in_rest) else []

    @property
    def in_call(self) -> bool:
        return self._state in (self._before_first, self._in_head, self._in_arguments)

    def _read(self) -> list[Piece]:
        pieces: list[Piece] = []
        while (found := self._state()) is not None:
            pieces += found
        return pieces

    def _in_text(self) -> list[Piece] | None:
        marker, text = self._form.marker, self._buffer
        if not self._form.anywhere:
            if not self._said and marker.startswith(text):
                return None
            self._state = self._before_first if not self._said and text.startswith(marker) else self._in_rest
            return []
        at = text.find(marker)
        if at >= 0:
            self._state = self._before_first
        else:
            # Characters at the end of the text that may be the start of the marker.
            most = min(len(text), len(marker) - 1)
            partial = next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)
            at = len(text) - partial
        # Blanks before a marker are not given, so those at the end wait for what follows.
        shown = text[:at].rstrip()
        self._buffer = text[at:] if self._state == self._before_first else text[len(shown) :]
        return self._text(shown) or ([] if self._state == self._before_first else None)

    def _before_first(self) -> list[Piece] | None:
        prefix = self._form.prefix
        if len(self._buffer) < len(prefix):
            return None if prefix.startswith(self._buffer) else self._no_call()
        if not self._buffer.startswith(prefix):
            return self._no_call()
        self._buffer = self._buffer[len(prefix) :]
        self._state = self._in_head
        return []

    def _in_head(self) -> list[Piece] | None:
        match = self._head.match(self._buffer)
        if match is None:
            return None
        self._buffer = self._buffer[match.end() :]
        self._place += 1
        self._value = _ObjectEnd()
        self._state = self._in_arguments
        return [CallPiece(self._place, self._form.new_id(), match.group(1))]

    def _in_arguments(self) -> list[Piece] | None:
        text, self._buffer = self._buffer, ""
        if not text:
            return None
        end = self._value.find(text)
        if end is None:
            return [ArgumentsPiece(self._place, text)]
        self._buffer = text[end:]
        self._state = self._behind_arguments
        return [ArgumentsPiece(self._place, text[:end])]

    def _behind_arguments(self) -> list[Piece] | None:
        """Read another call or the end of all calls, which may start alike."""
        text, another = self._buffer, self._form.tail + self._form.between
        end = self._form.tail + self._form.suffix
        if text.startswith(another):
            self._buffer, self._state = text[len(another) :], self._in_head
        elif another.startswith(text) or end.startswith(text):
            return None
        else:
            self._buffer, self._state = text.removeprefix(end), self._in_rest
        return []

    def _in_rest(self) -> list[Piece] | None:
        text, self._buffer = self._buffer, ""
        return self._text(text) or None

    def _no_call(self) -> list[Piece]:
        self._state = self._in_rest
        return []

    def _text(self, text: str) -> list[Piece]:
        self._said = self._said or bool(text)
        return [TextPiece(text)] if text else []


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """The end of the object in this piece; None where it goes on."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


@dataclass
class Call:
    """A call of a function, its arguments as far as they are written."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Reply:
    """A reply that is being made."""

    reader: ReplyReader = field(default_factory=PlainReader)
    text: str = ""  # so far, without calls
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # those of all tokens so far
    unsent: list[TokenLogprob] = field(default_factory=list)  # those that were not sent yet
    result: Result | None = None  # once finished

    def push(self, chunk: Chunk) -> list[Piece]:
        """Add a chunk and return the pieces that became certain with it."""
        self.logprobs += chunk.logprobs
        self.unsent += chunk.logprobs
        return self._gathered(self.reader.push(chunk))

    def finish(self, result: Result) -> list[Piece]:
        """Add the result and return the pieces that were held back."""
        self.result = result
        return self._gathered(self.reader.finish())

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities to send now."""
        unsent, self.unsent = self.unsent, []
        return unsent

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, if requested; minus infinity for an empty reply."""
        found = [token.logprob for token in self.logprobs]
        return sum(found) / len(found) if found else -math.inf

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended; cancelled replies count as "length". Calls whose arguments are complete can
        be answered, even where the reply was cut off after the last of them."""
        assert self.result is not None, "the reply is not finished"
        if self.calls and not self.reader.in_call:
            return "tool_calls"
        return "stop" if self.result.finish_reason == "stop" else "length"

    def _gathered(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    self.text += text
                case CallPiece(_, id_, name):
                    self.calls.append(Call(id_, name))
                case ArgumentsPiece(place, text):
                    self.calls[place].arguments += text
        return pieces


def usage(results: Sequence[Result], per_prompt: int = 1) -> dict[str, Any]:
    prompts = results[::per_prompt]
    prompt = sum(result.usage.prompt_tokens for result in prompts)
    completion = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.timings.cached_prompt_tokens for r in prompts)},
    }


def responses_usage(results: Sequence[Result]) -> dict[str, Any]:
    """Token counts in the fields of /v1/responses."""
    counted = usage(results)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counted["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }


def timings(results: Sequence[Result]) -> dict[str, Any]:
    """llama-server's timings, summed over the replies: of prompt evaluation and of generation."""
    cached = sum(result.timings.cached_prompt_tokens for result in results)
    prompt_n = sum(result.usage.prompt_tokens for result in results) - cached
    prompt_ms = sum(result.timings.prompt_ms for result in results)
    predicted_n = sum(result.usage.completion_tokens for result in results)
    # As in llama-server, from a reply's first token on.
    predicted_ms = sum(r.timings.per_token_ms * max(r.usage.completion_tokens - 1, 0) for r in results)
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": 1e3 * _ratio(prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
        "predicted_per_second": 1e3 * _ratio(predicted_n, predicted_ms),
        "draft_n": sum(result.speculation.drafted for result in results),
        "draft_n_accepted": sum(result.speculation.accepted for result in results),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def entries(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities in the form of chat completions and responses."""
    return [
        {**_entry(logprob), "top_logprobs": [_entry(other) for other in logprob.alternatives]} for logprob in logprobs
    ]


def token_table(logprobs: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """Log-probabilities in the form of legacy completions, and the offset of the text after them."""
    texts = [token_text(logprob) for logprob in logprobs]
    offsets = []
    for logprob in logprobs:
        offsets.append(offset)
        offset += len(logprob.bytes.decode("utf-8", "ignore"))
    table = {
        "tokens": texts,
        "token_logprobs": [logprob.logprob for logprob in logprobs],
        "top_logprobs": [_top(logprob) for logprob in logprobs],
        "text_offset": offsets,
    }
    return table, offset


def token_text(logprob: TokenLogprob) -> str:
    """A token's text; its bytes as OpenAI spells them where it is only a part of a character."""
    try:
        return logprob.bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.bytes)


def _top(logprob: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the token itself; of tokens with equal text, the likeliest."""
    found: dict[str, float] = {}
    for other in (*logprob.alternatives, logprob):
        found.setdefault(token_text(other), other.logprob)
    return found


def _entry(logprob: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(logprob), "logprob": logprob.logprob, "bytes": list(logprob.bytes)}
