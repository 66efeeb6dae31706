"""Trains the head by which a drafter predicts whether its token is accepted (SpecDec++).

The head reads the drafter's state before the final norm, scaled to unit size: one residual block, run three times, and
two scores. It learns min(1, p / q) of the drafter's likeliest token, where p is the target's probability and q the
drafter's. Rejections count six times as in the paper (arXiv 2405.19715), which sets its threshold for scores so biased;
here drafts end by what they cost, so that bundles keep scores without that bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from edgeinfer.bundle.additions import STATE_EPS, Heads
from edgeinfer.errors import ModelError
from edgeinfer.export.training.draft_heads import half
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TokenFile

_TIMES = 3
# A token that is wrongly thought accepted costs more than one that is wrongly held back.
_REJECTED_WEIGHT = 6.0
# Tokens of a batch that the drafter's own stand in for, as it will follow its own drafts.
_MIXED = 0.15
_WINDOWS = 24


class _Judge(torch.nn.Module):
    """The head; before training it is undecided."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.block = torch.nn.Linear(size, size)
        self.out = torch.nn.Linear(size, 2)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, states: torch.Tensor) -> torch.Tensor:  # (..., D) -> (..., 2), rejected and accepted
        """Scores."""
        x = states / (states.square().mean(-1, keepdim=True) + STATE_EPS).sqrt()
        for _ in range(_TIMES):
            x = x + F.silu(self.block(x))
        scores: torch.Tensor = self.out(x)
        return scores


class AcceptanceHeadTask:
    """The acceptance head of a drafter. Implements `trainer.Task`.

    Args:
        drafter: whose states it reads.
        target: with the same tokens.
        sources: what the target said and other text; they take turns.

    Raises:
        ModelError: the two have different vocabularies.
        UsageError: there is too little text.
    """

    name = "acceptance head"
    kind = "acceptance"

    def __init__(self, drafter: Target, target: Target, sources: tuple[TokenFile, ...], batches: Batches) -> None:
        if drafter.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            message = f"{drafter.folder} and {target.folder} have different vocabularies."
            raise ModelError(message, "Choose a drafter that was made for this model.")
        for tokens in sources:
            tokens.require(batches.length, "The text")
        self._drafter, self._target, self._sources, self._batches = drafter, target, sources, batches
        self._judge = _Judge(drafter.config.hidden_size).to(drafter.device)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        models = {"drafter": self._drafter.digest, "target": self._target.digest}
        return models | {"sources": [tokens.digest for tokens in self._sources]} | self._batches.facts

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The head's parameters."""
        return dict(self._judge.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """Cross-entropy of acceptance, rejections counting six times."""
        batch = self._batches.draw(self._sources[step % len(self._sources)], step, 0, self._drafter.device)
        generator = torch.Generator().manual_seed(self._batches.seed * 1_000_003 + step)
        total = torch.zeros((), device=batch.device)
        # Window by window, as each takes two rows of logits for every token.
        for window in batch:
            states, wanted, _, _ = self._facts(self._mixed(window[None], generator))
            log_probabilities = torch.log_softmax(self._judge(states), -1)  # (S, 2)
            total = (
                total
                - (wanted * log_probabilities[:, 1] + _REJECTED_WEIGHT * (1 - wanted) * log_probabilities[:, 0]).mean()
            )
        return total / len(batch)

    @torch.no_grad()
    def _mixed(self, window: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # (1, S) -> (1, S)
        """The window with some tokens replaced by the drafter's."""
        _, _, distribution, _ = self._facts(window)
        drawn = torch.multinomial(distribution.cpu(), 1, generator=generator).flatten()[:-1].to(window)
        taken = torch.rand(len(drawn), generator=generator).to(window.device) < _MIXED
        mixed = window.clone()
        mixed[0, 1:] = torch.where(taken, drawn, window[0, 1:])
        return mixed

    @torch.no_grad()
    def _facts(self, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For every token of a window (1, S): the drafter's state (S, D), how likely its best token is accepted (S,),
        its distribution (S, V), and whether its best token is the target's too (S,)."""
        model, kept = self._drafter.model, list[torch.Tensor]()
        hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
        try:
            q = torch.softmax(model(input_ids=window, use_cache=False).logits[0].float(), -1)
        finally:
            hook.remove()
        p = torch.softmax(self._target.model(input_ids=window, use_cache=False).logits[0].float(), -1)
        known = min(q.shape[1], p.shape[1])
        q, p = q[:, :known], p[:, :known]
        best = q.argmax(-1, keepdim=True)
        wanted = (p.gather(1, best) / q.gather(1, best)).clamp(max=1.0)[:, 0]
        return kept[0][0], wanted, q, best[:, 0] == p.argmax(-1)

    def heads(self, notes: Mapping[str, str]) -> Heads:
        """What was trained, as a bundle keeps it."""
        judge = self._judge
        arrays = {"weight": judge.block.weight, "bias": judge.block.bias}
        # Of scores that learnt with a weight w on rejections, the odds are 1 / w of the true ones.
        unbiased = judge.out.bias.detach() + torch.tensor(
            [0.0, math.log(_REJECTED_WEIGHT)], device=judge.out.bias.device
        )
        arrays |= {"out": judge.out.weight, "out_bias": unbiased}
        return Heads(self.kind, {name: half(array) for name, array in arrays.items()}, notes)

    @torch.no_grad()
    def curves(self, validation: TokenFile) -> tuple[float, float]:
        """Area under the ROC curve for acceptance in greedy decoding, of the head and of the drafter's own
        probability, on held-out text."""
        judged, trusted, came = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for window in validation.windows(self._batches.length, _WINDOWS):
            states, _, distribution, agrees = self._facts(torch.from_numpy(window)[None].to(self._drafter.device))
            scores = self._judge(states)
            judged.append(scores[:, 1] - scores[:, 0])
            trusted.append(distribution.max(-1).values)
            came.append(agrees)
        happened = torch.cat(came)
        return area_under_curve(torch.cat(judged), happened), area_under_curve(torch.cat(trusted), happened)


def area_under_curve(scores: torch.Tensor, happened: torch.Tensor) -> float:  # (N,), (N,)
    """How often something that happened scored higher than something that did not, ties counting half; 0.5 where
    nothing or everything happened."""
    high, low = scores[happened].double(), scores[~happened].double().sort().values
    if not len(high) or not len(low):
        return 0.5
    below = torch.searchsorted(low, high, right=False) + torch.searchsorted(low, high, right=True)
    return float(below.double().mean() / (2 * len(low)))
