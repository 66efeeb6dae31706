"""Judge decoding (Bachmann et al. 2025, arXiv 2501.19309): a rule that keeps drafted tokens by a trained head; lossy.

The head is taught without marks, as AutoJudge does (Garipov et al. 2025, arXiv 2504.20039; code
github.com/garipovroma/autojudge): the draft model's token takes the place of the model's, the model goes on, and the
token matters where the answer is no longer the model's own, or lacks words that a right reply has and the model's own
had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.additions import STATE_EPS, Heads, read_heads
from edgeinfer.core.errors import UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import require
from edgeinfer.runtime.speculation.drafters.contract import Deciding, Draft, TargetView, Verdict, Verifier
from edgeinfer.runtime.speculation.drafters.method import DrafterParts
from edgeinfer.runtime.speculation.verification.rule import Lesson, VerificationRule

_KIND = "judge"
# Tokens of a reply, and mismatches of one that are tried.
_LONGEST, _TRIED = 256, 48
# Mismatches of either kind without which nothing is learned, and parts of the questions, each judged by the others.
_FEWEST, _FOLDS = 10, 5
# Share of the replies in which the judge must stop every token that matters, on questions that it was not taught.
_SAFE = 0.9
_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
_STEPS = 50
_FORM = 'Write {"messages": [...], "answer": "..."} on each line, or "words": [...] that a right reply has.'
_HINT = "Give more questions of the kind that the model is used for."

Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class TokenJudge:
    """A linear head over the target's state in the row of a drafted token."""

    # `weight`, `bias`: of a score that is positive for tokens that may stay. (D,).
    weight: Floats
    bias: float

    @classmethod
    def of(cls, heads: Heads) -> TokenJudge:
        return cls(heads.arrays["weight"].astype(np.float32), float(heads.arrays["bias"][0]))

    def finds_right(self, state: Floats) -> bool:  # (D,)
        """Whether the token of a row may stay, by its state after the last layer."""
        return float(normed_states(state[None])[0] @ self.weight) + self.bias > 0

    def verify(self, draft: Draft, target: TargetView) -> Deciding:
        """Follow the target's choices as the keyed rule does, and where they leave the draft, keep the first guess that
        is judged right all the same."""
        accepted: list[int] = []
        at = -1
        while children := draft.children(at):
            yield at
            token = target.token(at)
            same = [child for child in children if draft.guesses[child].token == token]
            right = same or [c for c in children if self.finds_right(target.state(c)) and target.may_follow(c)]
            if not right:
                return Verdict(tuple(accepted), token, bonus=False)
            at = right[0]
            accepted.append(at)
        yield at
        return Verdict(tuple(accepted), target.token(at), bonus=True)


def normed_states(states: Floats) -> Floats:  # (S, D) -> (S, D)
    """States of unit mean square, as behind the final norm, whose own scale the judge's weight holds."""
    normed: Floats = states / np.sqrt((states * states).mean(axis=1, keepdims=True) + np.float32(STATE_EPS))
    return normed


def _bind(parts: DrafterParts) -> Verifier:
    hint = "Use a natively exported bundle, or another verification."
    require(parts.target.capabilities.hidden, parts.target, "give the states that a judge reads", hint)
    heads = None if parts.bundle is None else read_heads(parts.bundle, _KIND)
    if heads is None:
        message = "The model's bundle has no judge of drafted tokens."
        raise UsageError(message, "Teach one with edgeinfer tune --method judge --text FILE, or verify in another way.")
    return TokenJudge.of(heads).verify


def _unbound(draft: Draft, target: TargetView) -> Deciding:
    raise AssertionError("the rule is bound to a judge before it verifies")


class Writer(Protocol):
    """What teaching asks of a loaded model."""

    @property
    def context(self) -> int:
        """Tokens of its context."""

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end a reply."""

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation."""

    def detokenize(self, tokens: Sequence[int], *, special: bool) -> str:
        """The text of tokens."""

    def logits(self, tokens: Sequence[int]) -> Iterator[Floats]:
        """Logits behind every token, some rows at a time."""

    def generate(self, prompt: Sequence[int], *, max_tokens: int) -> Any:
        """A reply."""


@dataclass(frozen=True)
class RightReply:
    """A question and what makes a reply right."""

    messages: Sequence[Mapping[str, str]]
    parts: tuple[str, ...]  # texts that a right reply has, or, where `whole`, the one that it is
    whole: bool
    kind: str = "all"  # of question, for tables

    def lost(self, beginning: str) -> bool:
        """Whether no reply with this beginning can be the right one."""
        return self.whole and not _plain(self.parts[0]).startswith(_plain(beginning))

    def met(self, text: str) -> frozenset[str]:
        """The parts that a reply has."""
        plain = _plain(text)
        return frozenset(
            each for each in self.parts if (plain == _plain(each) if self.whole else _plain(each) in plain)
        )

    def share(self, text: str) -> float:
        """The share of the parts that a reply has."""
        return len(self.met(text)) / len(self.parts)


@dataclass(frozen=True)
class Mismatch:
    """A token of the draft model where the model says another."""

    tokens: tuple[int, ...]  # of the text, this token the last
    matters: bool  # the model, going on behind it, loses its answer, or a part of the right reply


@dataclass(frozen=True)
class JudgeGain:
    """How well a judge tells tokens that matter from others, on questions that it was not taught."""

    questions: int  # whose reply the draft model would change
    tokens: int  # mismatches that were tried
    matter: float  # share of them that matters
    area: float  # under the curve of both kinds
    kept: float  # share of the tokens that do not matter which may stay
    lost: float  # share of the replies with tokens that matter in which one of these may stay


def teach(lesson: Lesson) -> tuple[Heads, Mapping[str, Any]]:
    """Teach a judge on questions: the heads for the model's bundle, and how well they do. The text of the lesson has a
    JSON object on each line: "messages" of a chat, and "answer", where the reply is to stay what it is, or "words" that
    a right reply has."""
    asked = read_questions(lesson.text)
    states, matters, origin = list[Floats](), list[bool](), list[int]()
    for index, question in enumerate(asked):
        lesson.progress(index, len(asked))
        for each in list(find_mismatches(lesson.model, lesson.drafter, question)):
            states.append(lesson.last_state(each.tokens))
            matters.append(each.matters)
            origin.append(index)
    wrong = np.array(matters, np.bool_)
    if min(wrong.sum(), (~wrong).sum()) < _FEWEST:
        raise UsageError(f"{int(wrong.sum())} of {len(wrong)} drafted tokens matter, which teaches nothing.", _HINT)
    weight, bias, gain = _taught(normed_states(np.stack(states)), wrong, np.array(origin))
    notes = {
        "taught on": f"{len(wrong)} tokens of {gain.questions} replies, {gain.matter:.0%} of which matter",
        "on others": f"area under the curve {gain.area:.3f}, {gain.kept:.0%} stay, {gain.lost:.0%} of replies lose",
    }
    arrays = {"weight": weight.astype(np.float32), "bias": np.array([bias], np.float32)}
    return Heads(_KIND, arrays, notes), asdict(gain)


def find_mismatches(model: Writer, drafter: Writer, question: RightReply) -> Iterator[Mismatch]:
    """Try the draft model's tokens in the model's reply, one after the other; those that do not matter stay. A whole
    answer is the model's own, right or wrong. Of words that a reply is to have, those count that the model's own has;
    if it has none, the question tells nothing."""
    prompt = model.tokenize_chat(question.messages)
    room = min(_LONGEST, model.context - len(prompt), drafter.context - len(prompt))
    if room < 2:
        return
    ids = [*model.generate(prompt, max_tokens=room).token_ids]
    ends, start = {*model.end_ids}, 0
    own = _said(model, ids, ends)
    if question.whole:
        question = replace(question, parts=(own,))
    if not (needed := question.met(own)):
        return
    for _ in range(_TRIED):
        guesses = np.concatenate([rows.argmax(axis=1) for rows in drafter.logits([*prompt, *ids[:-1]])])
        guessed = guesses[len(prompt) - 1 :].tolist()
        place = next((place for place in range(start, len(ids)) if guessed[place] != ids[place]), None)
        if place is None:
            return
        other = [*ids[:place], guessed[place]]
        matters = question.lost(_said(model, other, ends))
        if not matters and other[-1] not in ends and len(other) < room:
            other += model.generate([*prompt, *other], max_tokens=room - len(other)).token_ids
        matters = matters or not needed <= question.met(_said(model, other, ends))
        yield Mismatch((*prompt, *ids[:place], guessed[place]), matters)
        ids, start = ids if matters else other, place + 1


def _said(model: Writer, ids: Sequence[int], ends: set[int]) -> str:
    return model.detokenize([token for token in ids if token not in ends], special=True)


def _taught(states: Floats, wrong: Flags, origin: NDArray[np.int64]) -> tuple[Doubles, float, JudgeGain]:
    """The score of a token that may stay, as weights (D,) and bias, and how well it does, each question by others:
    normed states (N, D), which tokens are wrong (N,), and the question of each (N,)."""
    inputs = states.astype(np.float64)
    means, scales = inputs.mean(axis=0), inputs.std(axis=0) + 1e-6
    inputs = (inputs - means) / scales
    # In the span of what was seen, which is all that such a fit tells of.
    turned = np.linalg.svd(inputs, full_matrices=False)[2]
    seen, fold = np.column_stack([inputs @ turned.T, np.ones(len(inputs))]), origin % _FOLDS
    best, scores, ridge = -1.0, np.zeros(len(seen)), _RIDGES[0]
    for tried in _RIDGES:
        judged = np.zeros(len(seen))
        for part in np.unique(fold):
            tested = fold == part
            judged[tested] = -seen[tested] @ _fitted(seen[~tested], wrong[~tested], tried)
        if (area := _area(judged, wrong)) > best:
            best, scores, ridge = area, judged, tried
    # One token that matters spoils a reply, so the worst of each reply counts.
    worst = np.array([scores[wrong & (origin == each)].max() for each in np.unique(origin[wrong])])
    least = float(np.quantile(worst, _SAFE))
    chosen = -_fitted(seen, wrong, ridge)
    weight = turned.T @ chosen[:-1] / scales
    kept, lost = float((scores[~wrong] > least).mean()), float((worst > least).mean())
    gain = JudgeGain(len(np.unique(origin)), len(wrong), float(wrong.mean()), best, kept, lost)
    return weight, float(chosen[-1] - means @ weight - least), gain


def _fitted(inputs: Doubles, wrong: Flags, ridge: float) -> Doubles:  # (N, K), (N,) -> (K,)
    if wrong.all() or not wrong.any():
        raise UsageError("The tokens that matter are all of a few questions.", _HINT)
    return fit_logistic(inputs, wrong, ridge)


def _area(scores: Doubles, wrong: Flags) -> float:  # (N,), (N,)
    """The chance that of two tokens, one of each kind, the one that may stay has the higher score."""
    low, others = np.sort(scores[wrong]), scores[~wrong]
    below, upto = np.searchsorted(low, others, "left"), np.searchsorted(low, others, "right")
    return float((below + upto).mean() / (2 * len(low)))


def fit_logistic(inputs: Doubles, wrong: NDArray[np.bool_], ridge: float) -> Doubles:  # (S, K), (S,) -> (K,)
    """Coefficients by which inputs tell the log-odds of what is wrong, right and wrong weighing the same."""
    weights = np.where(wrong, 0.5 / wrong.sum(), 0.5 / (~wrong).sum())
    chosen = np.zeros(inputs.shape[1])
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ chosen, -30, 30)))
        slope = inputs.T @ (weights * (wrong - chance)) - ridge * chosen
        bend = (inputs.T * (weights * chance * (1 - chance))) @ inputs + ridge * np.eye(len(chosen))
        step = np.linalg.solve(bend, slope)
        chosen += step
        if np.abs(step).max() < 1e-9:
            break
    return chosen


def read_questions(text: str) -> list[RightReply]:
    """The questions of a text, one on each line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            messages, answer, words = data["messages"], data.get("answer"), data.get("words", [])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"Line {number} is no question.", _FORM) from error
        if not (messages and _are(messages, dict) and _are(words, str)):
            raise UsageError(f"Line {number} is no question.", _FORM)
        parts = (str(answer),) if answer else tuple(word for word in words if _plain(word))
        if not parts:
            raise UsageError(f"Line {number} does not say what is right.", _FORM)
        found.append(RightReply(messages, parts, bool(answer), str(data.get("kind", "all"))))
    return found


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(".")


METHOD = VerificationRule(
    name="judge",
    help="keeps drafted tokens that a taught head finds right; lossy",
    verify=_unbound,
    bind=_bind,
    lossless=False,
    teach=teach,
)
