"""What a session learns of the costs that the controller goes by, from its replies and from measuring."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace

import pytest

from edgeinfer import load
from edgeinfer.runtime.decoding.strategy import SpeculationStatistics
from edgeinfer.runtime.profile.costs import Costs, DraftCosts, PassCosts
from edgeinfer.runtime.speculation import costs as device_costs
from edgeinfer.runtime.speculation.costs import DeviceCosts
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Guess
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from tests.runtime.speculation.prices import FLAT, Prices
from tests.runtime.speculation.prophets import Prophet, decode, text_of

FEW = PassCosts(((1, 10.0), (2, 11.0)))
FREE = DraftCosts({"copy": 0.0}, 0.0)


class Kept:
    """Costs that an earlier session measured, of a model with room for any pass."""

    def __init__(self, passes: PassCosts = FEW, drafts: DraftCosts = FREE) -> None:
        self.kept = Costs(passes, drafts, "", "")
        self.cache, self.capacity = self, 4096
        self.saved: list[Costs] = []
        self.save_costs = self.saved.append

    def open(self, most: int = 1) -> DeviceCosts:
        """What a session knows of them."""
        costs = DeviceCosts(self, self, False, most, lambda name: Prophet(name, (), 0.0))  # type: ignore[arg-type]
        costs.prepare()
        return costs

    def costs(self) -> Costs:
        return self.kept

    def arrays(self, name: str) -> None:
        return None


def test_what_guesses_cost_follows_the_rounds_of_replies() -> None:
    costs = Kept(drafts=DraftCosts({"model": 4.0}, 0.0)).open()
    text = text_of(60)
    run = decode([Prophet("model", text, 1.0)], text, Prices(FLAT, {"model": 0.5}))
    assert {name for name, _ in run.controller.timed_guesses} == {"model"}
    statistics = SpeculationStatistics()
    for ms in (0.4, 0.5, 30.0, 0.6, 0.5) * 8:
        statistics.add_guesses([("model", ms - 0.1), ("model", ms + 0.1), ("gone", 1.0)])
    costs.learn(statistics)
    assert costs.of([]).guess_ms("model") == pytest.approx(0.5, abs=0.2)
    costs.learn(SpeculationStatistics(timed_guesses={"model": [9.0, 9.0]}))
    assert costs.of([]).guess_ms("model") < 1.0


def test_what_tokens_take_besides_their_passes_follows_replies() -> None:
    kept = Kept()
    costs, saved = kept.open(), kept.saved
    costs.learn_overhead([0.1] * 4)
    costs.save()
    assert not saved, "so few tokens tell nothing"
    costs.learn_overhead([0.1, 0.1, 30.0, 0.1, 0.1])
    costs.save()
    assert saved[-1].drafts.token_ms == 0.1
    costs.learn_overhead([0.2] * 9)
    costs.save()
    assert 0.1 < (saved[-1].drafts.token_ms or 0.0) < 0.2
    kept.kept = saved[-1]
    kept.open().save()
    assert len(saved) == 2, "what was kept is known again"


@pytest.mark.slow
def test_costs_measured_in_a_busy_moment_follow_what_the_session_measures() -> None:
    """By what was kept every row costs a pass, and no draft pays; in truth few rows cost hardly more than one."""
    quiet = Prices({rows: 10.0 + 0.3 * (rows - 1) + 1.2 * max(0, rows - 4) for rows in range(1, 65)})
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
    for share, right in product((1.0, 3.0), (0.6, 0.95)):
        busy = Kept(PassCosts(tuple((rows, 5.0 + 10.0 * share * rows) for rows in sizes)))
        costs = busy.open(16)
        taken, best = 0.0, 0.0
        for reply in range(12):
            text = text_of(150, reply)
            prophets = [Prophet("copy", text, right, seed=reply) for _ in range(2)]
            run = decode(prophets[:1], text, quiet, rests=True, believed=costs.of([]))
            costs.learn(SpeculationStatistics(timed_passes=run.passes))
            # What is not known yet may cost little.
            assert run.ms <= 1.03 * run.plain_ms
            if reply >= 6:
                taken += run.ms
                best += decode(prophets[1:], text, quiet, rests=True).ms
        assert taken <= 1.06 * best, (share, right)
        known = costs.of([])
        for rows in range(1, 1 + known.confirmed):
            assert known.pass_ms(rows) == pytest.approx(quiet.pass_ms(rows), rel=0.1), (share, right, rows)


def test_what_reading_costs_follows_the_replies_and_one_busy_moment_moves_it_little() -> None:
    kept = Kept(drafts=DraftCosts({"model": 0.4, "copy": 0.0}, 0.0, read_ms={"model": 0.004}))
    costs = kept.open()
    assert (costs.of([]).read_ms("model"), costs.of([]).read_ms("copy")) == (0.004, 0.0)
    for ms in (0.01, 0.9, 0.01, 0.011, 0.01):
        statistics = SpeculationStatistics()
        statistics.add_guesses([], [("model", ms), ("gone", 1.0)])
        costs.learn(statistics)
        assert costs.of([]).read_ms("model") <= 0.011
    assert costs.of([]).read_ms("model") == pytest.approx(0.01)
    costs.save()
    assert kept.saved[-1].drafts.read_ms == {"model": pytest.approx(0.01)}


def test_reading_is_measured_with_the_guesses_of_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a guess moves by 1 ms, each token that it reads by 0.25, and one busy moment by 40."""
    now, guesses, busy = [0.0], ModelDrafter.guesses, iter([40.0])

    def timed(self: ModelDrafter, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        unread = 0 if drafted else self.unread(context)
        now[0] += (1.0 + 0.25 * unread + (next(busy, 0.0) if len(context.tokens) > 40 else 0.0)) / 1e3
        return guesses(self, context, drafted, width)

    with load(None, remember=False, speculation="auto") as model, model._idle() as parts:
        assert parts.speculator is not None
        costs = parts.speculator._costs
        monkeypatch.setattr(ModelDrafter, "guesses", timed)
        monkeypatch.setattr(device_costs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        costs.forget("model")
        known = costs.of([parts.speculator._drafter("model")])
        assert known.guess_ms("model") == pytest.approx(1.0)
        assert known.read_ms("model") == pytest.approx(0.25)
        assert known.read_ms("copy") == 0
