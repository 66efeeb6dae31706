"""What models write around their thoughts, and replies split into thought and answer while they are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.text.contract import TokenizerLike


@dataclass(frozen=True)
class ThoughtFormat:
    """The texts around a thought. An answer may begin with `header`; behind a thought, `between` comes before it."""

    start: str
    end: str
    header: str = ""
    between: str = ""

    def known_by(self, template: str) -> bool:
        # The end of a format with headers is the end of any message.
        return self.start in template or (not self.header and self.end in template)


FORMATS = (
    ThoughtFormat("<think>", "</think>"),  # Qwen, DeepSeek, GLM, SmolLM, Nemotron, MiniMax, OLMo, EXAONE, LFM
    ThoughtFormat("[THINK]", "[/THINK]"),  # Magistral
    ThoughtFormat("<seed:think>", "</seed:think>"),
    ThoughtFormat("<|channel>thought", "<channel|>"),  # Gemma 4
    ThoughtFormat("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>", "<|start|>assistant"),
    ThoughtFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThoughtFormat("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThoughtFormat("◁think▷", "◁/think▷"),  # Kimi
    ThoughtFormat("Here is my thought process:", "Here is my response:"),  # Granite 3
)
# A part of a tag that may be a token.
_MARK = re.compile(r"(<[^<>]+>|\[/?THINK\]|◁[^◁▷]+▷)")
# Tokens at the end of a prompt among which a tag is looked for.
_TAIL = 64
_State = Literal["start", "inside", "behind", "answer"]
# Characters that no text has. Stop strings take theirs from the other end of the range.
_LAST_SURROGATE = 0xDFFF


class ThoughtTags:
    """The texts around a thought as one vocabulary spells them: a part that is a token has a character of its own, so
    that other text does not read like it."""

    def __init__(self, form: ThoughtFormat, tokenizer: TokenizerLike, *, offered: bool = True) -> None:
        self.offered = offered  # whether a reply that must follow a grammar may think first
        self._tokenizer = tokenizer
        self._marks: dict[int, str] = {}
        self.start, self.end, self.header = (self._spelled(tag) for tag in (form.start, form.end, form.header))
        self.late_header = self._spelled(form.between) + self.header
        # The token that opens a thought, where both tags are tokens: it does so anywhere.
        opening, closing = tokenizer.token_to_id(form.start), tokenizer.token_to_id(form.end)
        self.start_id = opening if closing is not None else None
        self.end_ids = tokenizer.encode(form.end, add_special_tokens=False) if closing is None else [closing]
        self._hidden = dict.fromkeys(map(ord, self._marks.values()))

    @classmethod
    def of(cls, template: str | None, tokenizer: TokenizerLike) -> ThoughtTags | None:
        """The tags that a chat template knows, else those that are tokens; None for a model that does not think."""
        for form in FORMATS:
            if template is not None and form.known_by(template):
                return cls(form, tokenizer)
        for form in FORMATS:
            if None not in (tokenizer.token_to_id(form.start), tokenizer.token_to_id(form.end)):
                return cls(form, tokenizer, offered=False)
        return None

    def mark(self, token: int) -> str:
        """The character of a token that is a part of a tag; empty for others."""
        return self._marks.get(token, "")

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with tags as they are spelled here."""
        parts = []
        for mark, run in groupby(tokens, self.mark):
            ids = list(run)
            parts.append(mark * len(ids) if mark else self._tokenizer.decode(ids))
        return "".join(parts)

    def visible(self, text: str) -> str:
        return text.translate(self._hidden) if self._hidden else text

    def _spelled(self, tag: str) -> str:
        spelled = ""
        for part in _MARK.split(tag):
            token = self._tokenizer.token_to_id(part) if _MARK.fullmatch(part) else None
            if token is not None:
                part = self._marks.setdefault(token, chr(_LAST_SURROGATE - len(self._marks)))
            spelled += part
        return spelled


@dataclass(frozen=True)
class ThoughtStart:
    """Where a reply begins: inside a thought that its prompt opened, or where one may begin."""

    inside: bool
    may_open: bool

    @classmethod
    def after(cls, tags: ThoughtTags, prompt: Sequence[int], prefill: str) -> ThoughtStart:
        """Behind a prompt of a chat that ends with `prefill`, the beginning of the reply. What users wrote is not
        looked at."""
        text = tags.text(prompt[-_TAIL - len(prefill) :])
        given = tags.text(prompt[len(prompt) - len(prefill) :]) if prefill else ""
        opened, closed = given.rfind(tags.start), given.rfind(tags.end)
        if opened >= 0 or closed >= 0:
            return cls(opened > closed, False)
        head = text.removesuffix(prefill).rstrip()
        inside = head.endswith(tags.start)
        return cls(inside, not (prefill or inside or head.endswith(tags.end)))


class ThoughtSplitter:
    """Splits the text of a reply, which comes in pieces, into thoughts and answer. White space around a thought is
    shown with neither.

    Args:
        start: where the reply begins.
        strict: what the token that ends a thought writes behind it is dropped, as a grammar begins with the next.
    """

    def __init__(self, tags: ThoughtTags, start: ThoughtStart, *, strict: bool = False) -> None:
        self.tags, self.start = tags, start
        self.tokens = 0  # of thoughts, tags included
        self.in_thought = False  # whether the latest token belongs to a thought
        self.reasoning = ""  # that became certain with the latest text
        self._state: _State = "inside" if start.inside else "start" if start.may_open or tags.header else "answer"
        self._strict = strict
        self._withheld = ""
        self._waiting = 0  # tokens of what may become the tag that opens a thought
        self._shown = self._several = False  # whether thoughts have text so far; whether a further one has opened

    @property
    def inside(self) -> bool:
        """Whether the reply is inside a thought."""
        return self._state == "inside"

    def push(self, text: str, *, settles: bool = False) -> str:
        """Add the text of a token; return what is certain of the answer, which a token that `settles` begins."""
        before, self.reasoning = self.inside, ""
        self._waiting += self._state == "start"
        self._withheld += text
        answer = self._read()
        if settles and self._state == "start":
            answer, self._withheld, self._state = self.tags.visible(self._withheld), "", "answer"
        self.in_thought = before or self.inside
        if self.in_thought:
            self.tokens += self._waiting or 1
        if self._state != "start":
            self._waiting = 0
        return answer

    def finish(self, text: str) -> str:
        """Add the last text; return the rest of the answer."""
        self.reasoning, self._withheld = "", self._withheld + text
        answer, left = self._read(), self._withheld
        self._withheld = ""
        if not self.inside:
            return answer + self.tags.visible(left if left.strip() or self._state == "start" else "")
        self._think(left.rstrip())
        return answer

    def _read(self) -> str:
        answer, steps = (
            "",
            {"start": self._start, "inside": self._inside, "behind": self._behind, "answer": self._answer},
        )
        state: _State | None = None
        while state != self._state:
            state = self._state
            answer += steps[state]()
        return answer

    def _start(self) -> str:
        body, tags = self._withheld.lstrip(), self.tags
        if body.startswith(tags.start):
            self._withheld, self._state = body[len(tags.start) :], "inside"
        elif tags.header and body.startswith(tags.header):
            self._withheld, self._state = body[len(tags.header) :], "answer"
        elif not tags.start.startswith(body) and not tags.header.startswith(body):
            self._state = "answer"
        return ""

    def _inside(self) -> str:
        tags = self.tags
        if not self._shown or self._several:
            self._withheld = self._withheld.lstrip()
            if self._withheld.startswith(tags.start):  # although the prompt has opened the thought
                self._withheld = self._withheld[len(tags.start) :].lstrip()
            elif tags.start.startswith(self._withheld):
                return ""
        at = self._withheld.find(tags.end)
        if at >= 0:
            self._think(self._withheld[:at].rstrip())
            self._withheld, self._state = "" if self._strict else self._withheld[at + len(tags.end) :], "behind"
            return ""
        certain = self._withheld[: len(self._withheld) - _partial(self._withheld, tags.end)].rstrip()
        self._withheld = self._withheld[len(certain) :]
        self._think(certain)
        return ""

    def _behind(self) -> str:
        body, header = self._withheld.lstrip(), self.tags.late_header
        if body.startswith(header):
            self._withheld = body[len(header) :]
        elif header.startswith(body):
            return ""
        if self._withheld.strip():
            self._withheld, self._state = self._withheld.lstrip(), "answer"
        return ""

    def _answer(self) -> str:
        found = self._withheld.find(self.tags.start) if self.tags.start_id is not None else -1
        text, self._withheld = (
            (self._withheld, "") if found < 0 else (self._withheld[:found], self._withheld[found + 1 :])
        )
        if found >= 0:
            self._state, self._several = "inside", self._shown
        return self.tags.visible(text)

    def _think(self, text: str) -> None:
        text = self.tags.visible(text)
        if text:
            self.reasoning += "\n\n" * self._several + text
            self._shown, self._several = True, False


def _partial(text: str, tag: str) -> int:
    """Characters at the end of a text that may be the beginning of a tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
