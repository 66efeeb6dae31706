"""A*-style search (arXiv 2505.13672): the best beginning so far grows by several drawn steps, and each is scored."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.research.scoring import SCORER, asked_score
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import SearchMethod, SearchParts, SearchStrategy, logprob
from edgeinfer.runtime.text.streaming import ReplyText

# Tokens of a step that meets no end of a line.
_LONGEST = 48


@dataclass(eq=False)
class _Node:
    """A beginning of the reply."""

    text: ReplyText
    # That holds all of its tokens but the last; None of the empty one, and of those that are over.
    branch: Branch | None = None
    total: float = 0.0  # sum of its tokens' log-probabilities
    value: float = 0.0  # how good it is
    line: bool = False  # whether its last step has come to its end

    def over(self, most: int) -> bool:
        """Whether it has ended, or as many tokens as it may."""
        return self.text.ended or len(self.text.tokens) >= most

    def push(self, token: int, logits: Floats) -> None:  # (V,)
        """Its next token, of which these are the model's logits."""
        self.total += logprob(logits, token)
        self.line = "\n" in self.text.push(token) or self.text.ended


class AStar(SearchStrategy):
    """Answers with the first beginning that is over when its turn comes, or the best one after so many expansions. A
    step is a line, of 48 tokens at most. Beginnings are valued by the scorer, else by the mean log-probability of their
    tokens. Where the best one is not over, the reply goes on from it alone."""

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._options = METHOD.values(self._config.method_options)

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        most, first_logits = self._share(self._config.samples, room), logits.copy()
        branches = Branches(self._feeder)
        frontier = [_Node(self._parts.reply_text(prompt))]
        for turn in range(self._config.rounds):
            best = max(frontier, key=lambda node: node.value)
            if best.over(most) or branches.room < self._config.samples * (_LONGEST + len(best.text.tokens)):
                break
            frontier.remove(best)
            frontier += yield from self._expanded(best, prompt, first_logits, most, turn, branches)
        branches.end()
        frontier = [node for node in frontier if node.text.tokens]
        self.search.chosen = max(range(len(frontier)), key=lambda index: frontier[index].value)
        tokens = list(frontier[self.search.chosen].text.tokens)
        self.search.texts = tuple(self._searched_text(node.text, node.total) for node in frontier)
        return (yield from self._take(tokens, first_logits))

    def _expanded(
        self, node: _Node, prompt: Sequence[int], first: Floats, most: int, turn: int, branches: Branches
    ) -> Passes[list[_Node]]:  # (V,)
        """The beginnings that are a step longer, each once."""
        count, logits, tokens = self._config.samples, first, node.text.tokens
        if node.branch is not None:
            logits = (yield from branches.feed([(node.branch, tokens[-1:])]))[0].copy()
        children = [self._copy(node, prompt, branches) for _ in range(count)]
        if node.branch is not None:
            branches.drop(node.branch)
        for index, child in enumerate(children):
            self._draw(child, logits, len(prompt), turn * count + index)
        for _ in range(1, _LONGEST):
            live = [
                (index, child, child.branch)
                for index, child in enumerate(children)
                if child.branch is not None and not (child.line or child.over(most))
            ]
            if not live:
                break
            rows = yield from branches.feed([(branch, child.text.tokens[-1:]) for _, child, branch in live])
            for (index, child, _), row in zip(live, rows, strict=True):
                self._draw(child, row, len(prompt), turn * count + index)
        self.search.trials += count
        found: dict[tuple[int, ...], _Node] = {}
        for child in children:
            if found.setdefault(tuple(child.text.tokens), child) is not child or child.over(most):
                self._leave(child, branches)
        for child in found.values():
            child.value = self._value(child)
        return list(found.values())

    def _draw(self, node: _Node, logits: Floats, prompt: int, stream: int) -> None:  # (V,)
        sampler, tokens = self._parts.sampler, node.text.tokens
        probabilities = sampler.probabilities(logits, tokens)
        node.push(sampler.sample_from(probabilities, prompt + len(tokens), stream), logits)

    def _value(self, node: _Node) -> float:
        scorer = self._options["scorer"]
        if scorer is None:
            return node.total / len(node.text.tokens)
        return asked_score(scorer, node.text.text, node.text.ended)

    def _copy(self, node: _Node, prompt: Sequence[int], branches: Branches) -> _Node:
        branch = branches.begin() if node.branch is None else branches.fork(node.branch)
        return _Node(self._text_of(prompt, node.text.tokens), branch, node.total)

    @staticmethod
    def _leave(node: _Node, branches: Branches) -> None:
        """Free its rows."""
        if node.branch is not None:
            branches.drop(node.branch)
            node.branch = None


METHOD = SearchMethod(
    name="astar",
    help="grows the best beginnings by drawn lines (A*-decoding)",
    make=AStar,
    draws="always",
    constrained=True,
    thinks=True,
    options=(SCORER,),
)
