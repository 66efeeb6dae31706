"""What drafters promise, what a draft is and what a round tells. Words: the *root* is the last committed token, which
is chosen but not yet in the target's cache. A draft is a tree of tokens below the root; a chain is a tree without
branches. The target's pass feeds the root and then the draft's nodes, so node i is row i + 1 of the pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.decoding.sequence import Passes

Probabilities = NDArray[np.float64]  # (V,), a distribution over tokens
State = Mapping[str, NDArray[Any]]


class Draw(Protocol):
    """How a drafter that has logits chooses from them."""

    def __call__(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, Probabilities | None]:  # (V,)
        """The token after context and drafted tokens, and the distribution it was drawn from; None is deterministic.
        Deterministic draws use the target's own sampler with the draw of that position, so that a drafter that agrees
        with the target proposes what the target will sample."""


class Further(Protocol):
    """How further tokens are drawn from a distribution at a place where some were drawn before."""

    def __call__(
        self, probabilities: Probabilities, drafted: Sequence[int], taken: Sequence[int]
    ) -> int | None:  # (V,)
        """The next draw after `taken`, without replacement; None where nothing is left."""


def _nothing(probabilities: Probabilities, drafted: Sequence[int], taken: Sequence[int]) -> int | None:
    return None


@dataclass(frozen=True)
class DraftContext:
    """What a round starts from."""

    # All committed tokens, prompt and reply; the last is the root. A live list that only grows during a generation; not
    # to be changed by drafters.
    tokens: list[int]
    draw: Draw  # chooses from a drafter's logits
    # Tokens that a grammar or template leaves no choice about after these drafted ones; usually none.
    forced: Callable[[Sequence[int]], Sequence[int]]
    further: Further = _nothing  # draws siblings of a token that `draw` drew from a distribution
    # By how many tokens the text is longer than the target's cache with the root would be, because the text has
    # outgrown the context; 0 as long as it has not. It changes between rounds only.
    lost: Callable[[], int] = lambda: 0
    # A number in [0, 1) of a depth (0 for what follows the root), independent for each draw and of all tokens drawn,
    # for deciding where to draw.
    chance: Callable[[int, int], float] = lambda depth, draw: 0.5

    @property
    def root_row(self) -> int:
        """The row of the target's cache that the root will take."""
        return len(self.tokens) - 1 - self.lost()


class Guess(NamedTuple):
    token: int  # its id
    sign: int  # the evidence behind it, in [0, drafter.signs): acceptance is learnt for each sign apart
    # What it was drawn from, for verification by ratio; None is deterministic.
    probabilities: Probabilities | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that one pass of the target will verify."""

    guesses: tuple[Guess, ...] = ()  # the nodes, parents before children; of a chain in order
    parents: tuple[int, ...] = ()  # index of each node's parent, -1 for the root
    sources: tuple[str, ...] = ()  # name of the drafter of each node
    # How likely the path to each node is to be accepted; empty where it was not estimated.
    likely: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.guesses)

    @property
    def tokens(self) -> list[int]:
        """The nodes' tokens."""
        return [guess.token for guess in self.guesses]

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def children(self, node: int) -> list[int]:
        """Nodes below a node, or below the root (-1), in order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def depth(self, node: int) -> int:
        """Nodes above this one: 0 for a child of the root."""
        depth, parent = 0, self.parents[node]
        while parent >= 0:
            depth, parent = depth + 1, self.parents[parent]
        return depth

    def branch(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child to this one; empty for the root (-1)."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(nodes[::-1])

    def first(self, length: int) -> Draft:
        """Cut the draft to its first nodes."""
        if length == len(self):
            return self
        return Draft(self.guesses[:length], self.parents[:length], self.sources[:length], self.likely[:length])

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child to this node; empty for the root (-1)."""
        return [self.guesses[node].token for node in self.branch(node)]


class Verdict(NamedTuple):
    accepted: tuple[int, ...]  # nodes on the accepted path, from the root down
    token: int  # chosen after the last of them: the recovered token where a proposal was rejected, else the bonus
    bonus: bool  # whether the path ended at a node (or root) that had no child to reject


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass of the target decided, whichever drafter drafted; or several plain ones, without rows."""

    draft: Draft  # what was verified; may be empty
    verdict: Verdict  # what came of it
    committed: tuple[int, ...]  # tokens that the context grew by: the accepted ones and the verdict's
    fed: Ints  # tokens of the pass: the root, then the draft's nodes. (S,)
    # After each of them, or after those that are in memory, from `first_row` on; a view that is valid during `observe`.
    # (R, V).
    logits: Floats
    # States after the last layer of each of them, or, of plain steps, of the last one alone, which predicted the last
    # of `committed`; a view as well, None where the backend has none or the row is no longer there. (S, D) or (1, D).
    hidden: Floats | None = None
    branches: bool = True  # the reply's drafts may branch, so that drafters are asked for further guesses of a place
    first_row: int = 0  # of the rows whose logits are there; those before it had theirs, those behind may not have any


@dataclass(frozen=True)
class Resumption:
    """How a verification pass goes on where drafting left the target."""

    hidden: Floats  # states of every fed row that enter the first layer of the mask. (S, D)
    layer_mask: NDArray[np.bool_]  # layers still to run. (2 L,)


class TargetView(Protocol):
    """What verification may ask of the target after a pass, about nodes that it yielded, which count as in `Draft`; -1
    is the root."""

    def token(self, node: int) -> int:
        """The token that plain decoding chooses after this node, with the draw keyed by its position."""

    def probabilities(self, node: int) -> Probabilities:  # (V,)
        """The distribution after this node: penalties, bans, masks, temperature and truncation of its path applied."""

    def uniform(self, depth: int, draw: int) -> float:
        """A number in [0, 1) for choosing at this depth (`Draft.depth`: 0 for what follows the root). Independent for
        each draw, of the draw behind `token` and of drafters' draws."""


# What decides about a draft: yields each node before it looks at the logits behind it, and gives the verdict.
Deciding = Generator[int, None, Verdict]


class Verifier(Protocol):
    """Decides about a draft; a pure function of the draft and the target's view."""

    def __call__(self, draft: Draft, target: TargetView) -> Deciding:
        """The accepted path and the token after it."""


class Drafter:
    """Proposes tokens. Its state follows the context by `begin` and `observe`; `guesses` must not disturb it."""

    name: str  # as the command line knows it
    priors: Sequence[float]  # acceptance of each sign before anything was observed; its length is the number of signs
    # Whether guessing runs passes of the target, whose rows the engine drops before it verifies.
    uses_target: bool = False
    branches: bool = False  # whether `guesses` can give more than one
    draws: bool = False  # whether its guesses are drawn by `DraftContext.draw`, so that they may carry distributions
    copies: bool = False  # whether its guesses repeat the conversation
    follows_passes: bool = False  # whether it guesses only behind rows that it has seen passes of the target over
    at_once: bool = False  # whether the first guess of a round computes what all of them take; the others cost nothing

    def begin(self, tokens: Sequence[int]) -> None:
        """A generation begins after this prompt, or whatever of it differs from what is known already. Of a text that
        has outgrown the context it is the latest tokens, as many as the context holds."""

    def unread(self, context: DraftContext) -> int:
        """Tokens of the text that the next guess reads besides the root, as all of a prompt before the first one."""
        return 0

    def guesses(
        self, context: DraftContext, drafted: Sequence[int], width: int
    ) -> Sequence[Guess] | Passes[Sequence[Guess]]:
        """Up to `width` different tokens to follow context and drafted tokens, best first; empty where it has none.
        Drafters with a model yield its passes (`guessed`)."""
        raise NotImplementedError

    def resume(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Resumption | None]:
        """Called once before a chain is verified: how its pass can use what drafting computed; None is not at all.
        Called only on a drafter whose node is in the chain; the target's cache is then as the drafter left it."""
        return None
        yield

    def repeat(self) -> None:
        """Forget what the first of guesses made `at_once` computed for a round, so that it can be timed again."""

    def for_sequence(self, cache: KVCache) -> Drafter | None:
        """Another of its kind for one of several sequences, whose rows are in `cache` and with which it shares what
        both learn; None if none can. None of those with passes of their own can: next to others all would wait for each
        guess, and for rows of so many sequences in a draft model no plan has memory."""
        return None

    def observe(self, round: Round) -> None:
        """Learn from a round."""

    def nbytes(self) -> int:
        """Bytes that it holds."""
        return 0

    def state(self) -> State:
        """What is worth keeping for the next session with the same bundle; empty for none."""
        return {}

    def restore(self, state: State) -> None:
        """Take back what `state` gave."""

    def close(self) -> None:
        """Free what it holds."""


def guessed(drafter: Drafter, context: DraftContext, drafted: Sequence[int], width: int) -> Passes[Sequence[Guess]]:
    """The guesses of any drafter, with the passes that they take."""
    found = drafter.guesses(context, drafted, width)
    return (yield from found) if isinstance(found, Generator) else found


def main_branch_first(draft: Draft) -> Draft:
    """Put the main branch of a tree, the chain of first children, in front; other nodes keep their order.

    Where attention reads no pages, a row sums over the keys it sees in the order of
    their places in the cache: fed right behind the root, the main branch has the places that a chain has, so its rows
    round as plain decoding's do. Rows of side branches do not, nor do their keys and values from the second layer on.
    """
    if draft.is_chain:
        return draft
    main: list[int] = []
    children = draft.children(-1)
    while children:
        main.append(children[0])
        children = draft.children(children[0])
    order = [*main, *sorted(set(range(len(draft))) - set(main))]
    place = {-1: -1} | {node: new for new, node in enumerate(order)}
    return Draft(
        tuple(draft.guesses[node] for node in order),
        tuple(place[draft.parents[node]] for node in order),
        tuple(draft.sources[node] for node in order),
        tuple(draft.likely[node] for node in order) if draft.likely else (),
    )
