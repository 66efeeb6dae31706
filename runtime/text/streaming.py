"""Streams the text of token ids as they arrive, whole characters only, up to the first stop string. Special tokens have
no text. Where a stop string spells some, each gets a placeholder: a surrogate, which no text contains. Placeholders are
searched with the text, and never shown."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.text.contract import BYTE_LEVEL, BYTE_TOKEN, TokenizerLike, token_bytes
from edgeinfer.runtime.text.special_tokens import SpecialTokens
from edgeinfer.runtime.text.thoughts import ThoughtSplitter


class StopMatcher:
    """Knuth, Morris and Pratt's search for each of the stop strings, fed with text in pieces of any size.

    The match that ends first wins, and of several that end together the longest, so the outcome never depends on how
    the text was cut into pieces. Takes time that grows with the text times the number of stop strings, and four bytes
    of memory for each of their characters.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        # The longest first, so that of several that end together it is the first found.
        self._searches = [_Search(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._withheld = ""
        self.found: str | None = None  # the one that was found; None while none was

    @property
    def matched(self) -> bool:
        """Whether a stop string was found; all later text is swallowed."""
        return self.found is not None

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to show, and whether a stop string was found (then only the text before it)."""
        if self.matched:
            return "", True
        # The end of the first match, and where the longest that ends there begins.
        found = min(
            ((end, -len(search.stop)) for search in self._searches if (end := search.push(text)) is not None),
            default=None,
        )
        whole = self._withheld + text
        if found is not None:
            end = len(self._withheld) + found[0]
            shown, self.found = whole[: end + found[1]], whole[end + found[1] : end]
            self._withheld = ""
            return shown, True
        safe = len(whole) - max((search.length for search in self._searches), default=0)
        self._withheld = whole[safe:]
        return whole[:safe], False

    def flush(self) -> str:
        """Return the withheld text at the end of the stream; empty after a match."""
        withheld, self._withheld = self._withheld, ""
        for search in self._searches:
            search.length = 0
        return withheld


class _Search:
    """Finds one string; `length` is that of its longest beginning that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._shorter = _borders(stop)

    def push(self, text: str) -> int | None:
        """Where in the text the string first ends, None where it does not."""
        stop, shorter, length = self.stop, self._shorter, self.length
        for index, character in enumerate(text):
            while length and stop[length] != character:
                length = shorter[length]
            length += stop[length] == character
            if length == len(stop):
                return index + 1
        self.length = length
        return None


def _borders(stop: str) -> array[int]:
    """For each length of a beginning of the string, the length of the longest shorter one that it ends with."""
    borders = array("I", [0, 0])
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders


@dataclass(frozen=True)
class CallMark:
    """What the calls of a reply begin with: one of these texts anywhere in it, one only at its beginning, or a special
    token."""

    anywhere: tuple[str, ...]
    first: tuple[str, ...] = ()
    token: int | None = None


class CallStops:
    """Looks for stop strings in the text before calls alone; white space before their mark belongs to them."""

    def __init__(self, matcher: StopMatcher, mark: CallMark) -> None:
        self._matcher, self._mark = matcher, mark
        self._pending = ""  # what may belong to calls
        self._started = self._calls = False  # whether there was text before calls; whether calls have started

    @property
    def found(self) -> str | None:
        return self._matcher.found

    def push(self, text: str) -> tuple[str, bool]:
        if self._calls:
            return text, False
        self._pending += text
        pending, mark = self._pending, self._mark
        if not self._started and mark.first:
            start = pending.lstrip()
            if start.startswith(mark.first):
                return self.begin(len(pending) - len(start))
            if any(each.startswith(start) for each in mark.first):
                return self._matcher.push("")
        places = [place for each in mark.anywhere if (place := pending.find(each)) >= 0]
        if places:
            return self.begin(min(places))
        longest = max(map(len, mark.anywhere), default=0)
        starts = range(max(len(pending) - longest, 0), len(pending))
        kept = next((at for at in starts if any(each.startswith(pending[at:]) for each in mark.anywhere)), len(pending))
        content = pending[:kept]
        if mark.anywhere or mark.token is not None:
            content = content.rstrip()
        self._pending, self._started = pending[len(content) :], self._started or bool(content)
        return self._matcher.push(content)

    def begin(self, place: int | None = None) -> tuple[str, bool]:
        """Begin the calls at a place of the pending text, or after it."""
        pending, self._pending = self._pending, ""
        content = pending[:place].rstrip()
        shown, matched = self._matcher.push(content)
        if matched:
            return shown, True
        self._calls = True
        return shown + self._matcher.flush() + pending[len(content) :], False

    def flush(self) -> str:
        pending, self._pending = self._pending, ""
        shown, matched = (pending, False) if self._calls else self._matcher.push(pending)
        return shown if matched else shown + self._matcher.flush()


# Enough tokens to hold a character cut by the end of the prompt and one token with text before it.
_CONTEXT_TOKENS = 32
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4  # of UTF-8
_FIRST_SURROGATE, _SURROGATES = 0xD800, 0x800


class ReplyText:
    """The text of a reply as its tokens come, up to a stop token or a stop string, none of which is looked for in
    thoughts and calls of functions; special tokens that stop strings spell are found where the token is drawn."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        stops: tuple[str, ...],
        stop_ids: frozenset[int],
        context_ids: Sequence[int] = (),
        calls: CallMark | None = None,
        thoughts: ThoughtSplitter | None = None,
    ) -> None:
        self._stop_ids = stop_ids
        self._thoughts, self._special_ids = thoughts, tokenizer.special_ids
        self._decoder = StreamDecoder(tokenizer, context_ids)
        self._special = _SpecialTokensInStops(tokenizer, stops, stop_ids) if stops else None
        matcher = StopMatcher(self._special.stops) if self._special is not None else None
        self._calls = CallStops(matcher, calls) if matcher is not None and calls is not None else None
        self._call_token = None if calls is None else calls.token
        self._stops = matcher if self._calls is None else self._calls
        self._shown: list[str] = []
        self._reasoning: list[str] = []
        self._late = ""  # shown with a stop token
        self.tokens: list[int] = []  # so far, a stop token included
        self.decoded = ""  # text that became certain with the last of them, whether it may be shown or not
        self.ended = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found; None while none was."""
        if self._stops is None or self._special is None or self._stops.found is None:
            return None
        return self._special.spelled(self._stops.found)

    @property
    def text(self) -> str:
        return "".join(self._shown)

    def push(self, token: int) -> str:
        """Add a token; return the text that may be shown with it."""
        self.tokens.append(token)
        is_end = token in self._stop_ids
        text = "" if is_end else self._decoder.push(token) if self._thoughts is None else self._answer(token)
        self.decoded = text
        if self._thoughts is not None and self._thoughts.in_thought and not (text or is_end):
            return ""
        if self._calls is not None and token == self._call_token:
            text, self.ended = self._calls.begin()
        elif self._stops is not None and self._special is not None:
            text, self.ended = self._stops.push(text + self._special.placeholder(token))
            text = self._special.visible(text)
        if is_end:
            self.ended, self._late = True, text
            return ""
        self._shown.append(text)
        return text

    @property
    def reasoning(self) -> str:
        """The thoughts so far."""
        return "".join(self._reasoning)

    def _answer(self, token: int) -> str:
        """The part of a token's text that belongs to the answer."""
        thoughts = self._thoughts
        assert thoughts is not None, "the reply may hold some"
        mark = thoughts.tags.mark(token)
        text = self._decoder.flush() + mark if mark else self._decoder.push(token)
        # Text that waits for a tag must not come behind a special token, such as the mark of a call.
        text = thoughts.push(text, settles=not mark and token in self._special_ids)
        self._reasoning.append(thoughts.reasoning)
        return text

    def finish(self) -> str:
        """Return the withheld text at the end of the reply."""
        text = self._decoder.flush()
        if self._thoughts is not None:
            text = self._thoughts.finish(text)
            self._reasoning.append(self._thoughts.reasoning)
        if self._stops is not None and self._special is not None:
            text, found = self._stops.push(text)
            text = self._special.visible(text + ("" if found else self._stops.flush()))
        self._shown.append(self._late + text)
        return self._shown[-1]


class _SpecialTokensInStops:
    """Special tokens that stop strings spell, each with a placeholder character."""

    def __init__(self, tokenizer: TokenizerLike, stops: tuple[str, ...], stop_ids: frozenset[int]) -> None:
        ends = {tokenizer.id_to_token(id_) or "": id_ for id_ in stop_ids}
        known = {text: id_ for text, id_ in (ends | dict(tokenizer.control_texts)).items() if text}
        special = {text: id_ for text, id_ in known.items() if any(text in stop for stop in stops)}
        ids = dict.fromkeys(special.values())
        free = range(_FIRST_SURROGATE, _FIRST_SURROGATE + _SURROGATES)
        self._placeholders = {id_: chr(code) for code, id_ in zip(free, ids, strict=False)}
        replaced = {text: self._placeholders.get(id_, text) for text, id_ in special.items()}
        split = SpecialTokens(special).split
        self._spelled = {"".join(replaced.get(part, part) for part in split(stop)): stop for stop in stops}
        self._spelled |= {stop: stop for stop in stops}
        self._hidden = dict.fromkeys(map(ord, self._placeholders.values()))
        self.stops = tuple(self._spelled)

    def placeholder(self, token: int) -> str:
        """The placeholder of a token in the text that is searched; empty for one that no stop string spells."""
        return self._placeholders.get(token, "")

    def visible(self, text: str) -> str:
        """The text without placeholders."""
        return text.translate(self._hidden) if self._hidden else text

    def spelled(self, found: str) -> str:
        return self._spelled[found]


class StreamDecoder:
    """Streams the text of token ids in constant time per token; special tokens add nothing.

    The pieces and the flush joined are the library's decoding of all ids, with one exception. Where byte tokens
    (``<0xE6>``) of a SentencePiece-like tokenizer form an invalid run, the library turns the whole run into
    replacement characters, also those of its bytes that are valid; here valid characters, which may have been shown
    already, stand, and each invalid byte is one replacement character.

    Args:
        context_ids: ids that precede the stream, so that it continues their text: the first word keeps its leading
            space, and a character they leave incomplete is completed. Only the last few matter.
    """

    def __init__(self, tokenizer: TokenizerLike, context_ids: Sequence[int] = ()) -> None:
        self._special = tokenizer.special_ids
        types = tokenizer.decoder_types
        self._pieces: _Pieces = _BytePieces(tokenizer) if types == BYTE_LEVEL else _WindowPieces(tokenizer)
        for token_id in context_ids[-_CONTEXT_TOKENS:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; empty while a character is incomplete."""
        return "" if token_id in self._special else self._pieces.push(token_id)

    def flush(self) -> str:
        """Return the withheld text, with incomplete characters replaced; ends the stream."""
        return self._pieces.flush()


class _Pieces(ABC):
    """Text of tokens in arrival order; special tokens never get here."""

    @abstractmethod
    def push(self, token_id: int) -> str: ...

    @abstractmethod
    def flush(self) -> str: ...


class _BytePieces(_Pieces):
    """Byte-level tokens: each spells bytes in the GPT-2 alphabet, and the text is those bytes as UTF-8."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}  # of the tokens so far
        # Replaces each maximal invalid subsequence by one character, as the library does.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        spelled = self._known.get(token_id)
        if spelled is None:
            token = self._tokenizer.id_to_token(token_id)
            spelled = self._known[token_id] = b"" if token is None else token_bytes(token)
        return self._utf8.decode(spelled)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowPieces(_Pieces):
    """Any other tokenizer: decodes new tokens behind the last ones that had text, as decoders treat the start of a text
    differently."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._byte_fallback = "ByteFallback" in tokenizer.decoder_types
        self._before: list[int] = []  # stays empty until some token has had text
        self._before_length = 0  # characters that `_before` alone decodes to
        self._pending: list[int] = []
        self._bytes = b""  # of the character that the last pending tokens, byte tokens all, started

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        match = BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match is not None:
            return self._push_byte(token_id, bytes([int(match.group(1), 16)]))
        broken = self._emit() if self._bytes else ""
        self._pending.append(token_id)
        text = self._new_text()
        # Decoders of unknown make may split characters too: wait for the rest, but no longer than one can be.
        split = not self._byte_fallback and text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_CHARACTER_BYTES
        return broken if split else broken + self._emit()

    def flush(self) -> str:
        return self._emit()

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        # A byte that cannot continue the character leaves its predecessors invalid and starts afresh.
        broken = self._emit() if self._bytes and not _is_utf8_prefix(self._bytes + byte) else ""
        self._pending.append(token_id)
        self._bytes += byte
        return broken if _is_incomplete(self._bytes) else broken + self._emit()

    def _emit(self) -> str:
        text = self._new_text()
        self._bytes = b""
        # Tokens without text, such as a stripped leading space, stay: what follows them decides what they become.
        if text or len(self._pending) >= _CONTEXT_TOKENS:
            length = len(self._tokenizer.decode(self._pending))
            if length:
                self._before, self._before_length = self._pending, length
            self._pending = []
        return text

    def _new_text(self) -> str:
        if not self._bytes or not self._before:
            return self._tokenizer.decode(self._before + self._pending)[self._before_length :] if self._pending else ""
        # Not through the library: there, one invalid byte would also replace valid characters of its run.
        if _is_utf8_prefix(self._bytes) and not _is_incomplete(self._bytes):
            return self._bytes.decode("utf-8")
        return _REPLACEMENT * len(self._bytes)


def _is_incomplete(data: bytes) -> bool:
    """Whether more bytes can make this one UTF-8 character."""
    return _is_utf8_prefix(data) and codecs.utf_8_decode(data, "strict", False)[1] == 0


def _is_utf8_prefix(data: bytes) -> bool:
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return True
