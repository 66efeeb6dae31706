"""A judge of drafted tokens, taught on questions: which mismatches with the model leave the answer right.

Judge decoding (Bachmann et al. 2025, arXiv 2501.19309) has people mark wrong tokens. Here they are found as AutoJudge
does (Garipov et al. 2025, arXiv 2504.20039; code github.com/garipovroma/autojudge): the draft model's token takes the
place of the model's, the model goes on, and the token matters where the answer is no longer the model's own, or lacks
words that a right reply has and the model's own had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api import Model, load
from edgeinfer.bundle.additions import Heads, add_heads
from edgeinfer.bundle.opening import nested_drafter, open_bundle
from edgeinfer.errors import Setting, UsageError
from edgeinfer.hub import resolve
from edgeinfer.option_types import LoadOptions
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.verification import normed_states
from edgeinfer.runtime.tuning.measure import last_state
from edgeinfer.tools.uncertainty import fit_logistic

# Tokens of a reply, and mismatches of one that are tried.
_LONGEST, _TRIED = 256, 48
# Mismatches of either kind without which nothing is learnt, and parts of the questions, each judged by the others.
_FEWEST, _FOLDS = 10, 5
# Share of the replies in which the judge must stop every token that matters, on questions that it was not taught.
_SAFE = 0.9
_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
_FORM = 'Write {"messages": [...], "answer": "..."} on each line, or "words": [...] that a right reply has.'
_HINT = "Give more questions of the kind that the model is used for."

Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class RightReply:
    """A question and what makes a reply right.

    Attributes:
        parts: texts that a right reply has, or, where `whole`, the one that it is.
        kind: of question, for tables.
    """

    messages: Sequence[Mapping[str, str]]
    parts: tuple[str, ...]
    whole: bool
    kind: str = "all"

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
    """A token of the draft model where the model says another.

    Attributes:
        tokens: of the text, this token the last.
        matters: the model, going on behind it, loses its answer, or a part of the right reply.
    """

    tokens: tuple[int, ...]
    matters: bool


@dataclass(frozen=True)
class JudgeGain:
    """How well a judge tells tokens that matter from others, on questions that it was not taught.

    Attributes:
        questions: whose reply the draft model would change.
        tokens: mismatches that were tried.
        matter: share of them that matters.
        area: under the curve of both kinds.
        kept: share of the tokens that do not matter which may stay.
        lost: share of the replies with tokens that matter in which one of these may stay.
    """

    questions: int
    tokens: int
    matter: float
    area: float
    kept: float
    lost: float


def tune_judge(
    model: str | Path | None,
    text: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[LoadOptions],
) -> JudgeGain:
    """Teaches a judge on questions and puts it into the model's bundle; `verification="judge"` asks it.

    Args:
        model: bundle directory; None is the built-in model.
        text: a JSON object on each line: "messages" of a chat, and "answer", where the reply is to stay what it is, or
            "words" that a right reply has.
        progress: called with questions asked and to ask.
        options: as `load` takes them; the draft model is theirs, or the one inside the bundle.

    Raises:
        UsageError: a line is no question, there is no draft model, or too few tokens matter, or too many.
        CapabilityError: the backend gives no hidden states.
        ModelError: as `load`.
        StorageError: the bundle cannot be written.
    """
    asked, path = read_questions(text), resolve(model)
    given: dict[str, Any] = {"remember": False, **options, "speculation": "off"}
    small = given.pop("draft_model", None)
    if small is None and (found := nested_drafter(open_bundle(path))) is not None and found.manifest.module is None:
        small = found.path
    if small is None:
        hint = f"Name one with {Setting('draft_model')}."
        raise UsageError("Which drafted tokens may stay is learnt from a draft model's.", hint)
    states, matters, origin = list[Floats](), list[bool](), list[int]()
    own = {name: given[name] for name in ("threads", "context") if name in given}
    with load(path, **given) as loaded, load(small, speculation="off", remember=False, **own) as drafter:
        if loaded.vocabulary_digest != drafter.vocabulary_digest:
            hint = "Name one with the same tokenizer."
            raise UsageError("The draft model's tokens are not the model's.", hint)
        for index, question in enumerate(asked):
            if progress is not None:
                progress(index, len(asked))
            for each in list(find_mismatches(loaded, drafter, question)):
                with loaded._idle() as parts:
                    states.append(last_state(parts.engine, each.tokens))
                matters.append(each.matters)
                origin.append(index)
    wrong = np.array(matters, np.bool_)
    if min(wrong.sum(), (~wrong).sum()) < _FEWEST:
        raise UsageError(f"{int(wrong.sum())} of {len(wrong)} drafted tokens matter, which teaches nothing.", _HINT)
    weight, bias, gain = _taught(normed_states(np.stack(states)), wrong, np.array(origin))
    notes = {"taught on": f"{len(wrong)} tokens of {gain.questions} replies, {gain.matter:.0%} of which matter"}
    notes |= {
        "on others": f"area under the curve {gain.area:.3f}, {gain.kept:.0%} stay, {gain.lost:.0%} of replies lose"
    }
    arrays = {"weight": weight.astype(np.float32), "bias": np.array([bias], np.float32)}
    add_heads(path, Heads("judge", arrays, notes))
    return gain


def find_mismatches(model: Model, drafter: Model, question: RightReply) -> Iterator[Mismatch]:
    """Tries the draft model's tokens in the model's reply, one after the other; those that do not matter stay.

    A whole answer is the model's own, right or wrong. Of words that a reply is to have, those count that the model's
    own has; if it has none, the question tells nothing.
    """
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


def _said(model: Model, ids: Sequence[int], ends: set[int]) -> str:
    return model.detokenize([token for token in ids if token not in ends], special=True)


def _taught(states: Floats, wrong: Flags, origin: NDArray[np.int64]) -> tuple[Doubles, float, JudgeGain]:
    """The score of a token that may stay, as weights (D,) and bias, and how well it does, each question by others.

    Args:
        states: of tokens, normed. (N, D)
        wrong: those that matter. (N,)
        origin: number of their question. (N,)
    """
    inputs = states.astype(np.float64)
    means, scales = inputs.mean(axis=0), inputs.std(axis=0) + 1e-6
    inputs = (inputs - means) / scales
    # In the span of what was seen, which is all that such a fit tells of.
    turned = np.linalg.svd(inputs, full_matrices=False)[2]
    seen, fold = np.column_stack([inputs @ turned.T, np.ones(len(inputs))]), origin % _FOLDS
    best, scores, ridge = -1.0, np.zeros(len(seen)), _RIDGES[0]
    for tried in _RIDGES:
        told = np.zeros(len(seen))
        for part in np.unique(fold):
            tested = fold == part
            told[tested] = -seen[tested] @ _fitted(seen[~tested], wrong[~tested], tried)
        if (area := _area(told, wrong)) > best:
            best, scores, ridge = area, told, tried
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


def read_questions(text: str) -> list[RightReply]:
    """The questions of a text, one on each line.

    Raises:
        UsageError: a line is none.
    """
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
