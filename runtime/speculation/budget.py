"""What drafting may risk in a reply, so that no reply ends up slower than plain decoding.

Savings pay for drafts. Where tables were right about the latest plain steps, a draft of theirs is trusted with what it
may lose, so that replies which repeat something draft after a few tokens; what is lost has to be saved again.
What a drafter reads before its first guess, as a whole prompt, comes out of a budget of its own and of savings.
"""

from __future__ import annotations

import math

# What a reply may lose against plain decoding before it has gained anything: this share of what plain decoding would
# have taken so far. Beyond that a draft may only risk what earlier ones saved.
_LOSS_BUDGET = 0.01
# What a reply may lose on top, as a share of a pass: enough to ask tables at its beginning, and so little that even a
# reply of two more tokens is at most a fiftieth slower.
_FIRST_LOSS_BUDGET = 0.015
# What a reply may lose besides to what drafters read before their first guess, as a share of the same: savings alone
# would not grow where asking takes all of them, and a drafter that would be right would never read the prompt.
_READING_BUDGET = 0.005
# Guesses in a row that have to be right at plain steps before a draft of the same drafters is trusted, and how many
# wrong ones of the reply require one more. In stories two are enough; where most are wrong two are chance.
_RIGHT, _WRONG_FOR_ONE = 2, 3
# What it is trusted with, as a share of a pass: the risk of a draft of three tokens, by the c(m) of a small model on
# two cores.
_TRUST = 0.235
# Wrong guesses of a reply before no more are looked at, which costs a quarter of a percent.
_MOST_WRONG = 8
# Plain steps at most that are saved up before drafters are asked: where a row costs most of a pass, only drafts that
# are certain pay, and those risk nothing.
_LONGEST_SAVING = 64
# Tokens of a reply after which drafters are asked though nothing has paid for it: on models so small that asking costs
# most of a pass, drafting would otherwise begin only after some seventy.
_UNPAID = (8, 32)
# Rounds after which it is asked whether drafting, its own work included but not what was read before, was faster than
# plain decoding; and how long no drafter is asked for anything where it was not: twice as long each time, up to where
# looking again costs a percent.
_TRIAL = 24
_FIRST_REST, _LONGEST_REST = 16, 1024


class LossBudget:
    """Keeps what a reply of `said` tokens so far has saved against plain decoding, and tells what that pays for."""

    def __init__(self, plain_ms: float, shortest_ms: float) -> None:
        self._plain_ms = plain_ms
        self._reserve = min(max(self.risk(shortest_ms), 0.0), _LONGEST_SAVING * _LOSS_BUDGET * plain_ms)
        self._saved = _FIRST_LOSS_BUDGET * plain_ms
        self.said, self._unpaid = 0, list(_UNPAID)
        self._for_reading = 0.0
        self._right = self._wrong = 0  # guesses for plain steps that proved so: in a row since the last round; in all

    @property
    def trusts_tables(self) -> bool:
        """Whether a draft may lose more than what is saved, as guesses for the latest plain steps were right."""
        return self._right >= _RIGHT + self._wrong // _WRONG_FOR_ONE

    @property
    def free(self) -> float:
        """Milliseconds that may be lost now."""
        return max(self._saved + (_TRUST * self._plain_ms if self.trusts_tables else 0.0), 0.0)

    def may_trust_tables(self, asking_ms: float) -> bool:
        """Whether a loan would pay for asking drafters and the shortest draft, so that it is worth judging them."""
        return self._wrong < _MOST_WRONG and self._saved + _TRUST * self._plain_ms >= asking_ms + self._reserve

    def judge(self, right: bool) -> None:
        """Learn whether the surest guess for a plain step was the token that came."""
        self._right = self._right + 1 if right else 0
        self._wrong += not right

    def risk(self, ms: float, sure: int = 1) -> float:
        """What a reply would lose by a round that takes so long and give no more than these tokens."""
        return ms - sure * self._plain_ms * (1 + _LOSS_BUDGET)

    def covers(self, ms: float, sure: int = 1) -> bool:
        """Whether a round that takes so long and give no more than these tokens would leave the reply no slower."""
        return self.risk(ms, sure) <= self.free

    def reading_due(self, ms: float) -> float:
        """What savings would have to pay of reading that takes so long: the budget for it pays first."""
        return max(0.0, ms - self._for_reading)

    def add_reading(self, ms: float) -> None:
        """Enter what a drafter read."""
        due = self.reading_due(ms)
        self._for_reading -= ms - due
        self._saved -= due

    def steps_to_save(self, asking_ms: float) -> int:
        """Plain steps before asking drafters is paid for, and the shortest draft too if they know one. Asking that
        spends what the draft would need finds drafts that it cannot risk."""
        budget = _LOSS_BUDGET * self._plain_ms
        steps = math.ceil((asking_ms + self._reserve - budget - self.free) / budget)
        if self._unpaid:
            steps = min(steps, self._unpaid[0] - self.said)
        return max(steps, 0)

    def begin_round(self) -> None:
        """Drafters are asked now."""
        if self._unpaid and self.said >= self._unpaid[0]:
            del self._unpaid[0]

    def add_round(self, tokens: int, ms: float) -> None:
        """Enter what a round gave and took; no other is trusted before further guesses proved right."""
        self._right = 0
        self.add_steps(tokens, ms)

    def add_steps(self, tokens: int, ms: float) -> None:
        """Enter what plain steps gave and took."""
        self._saved += tokens * self._plain_ms * (1 + _LOSS_BUDGET) - ms
        self._for_reading += tokens * self._plain_ms * _READING_BUDGET
        self.said += tokens


class Trials:
    """Has drafting rest for a while where a trial of it was no faster than plain decoding would have been."""

    def __init__(self) -> None:
        self._rounds, self._lost = 0, 0.0  # since the last rest
        self._next_rest, self.rest = _FIRST_REST, 0

    def add_round(self, lost_ms: float) -> None:
        """Enter how much longer a round took than plain steps would have for its tokens."""
        self._rounds, self._lost = self._rounds + 1, self._lost + lost_ms
        if self._rounds < _TRIAL:
            return
        if self._lost > 0:
            self.rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        else:
            self._next_rest = _FIRST_REST
        self._rounds, self._lost = 0, 0.0

    def rested(self, steps: int) -> None:
        """Enter plain steps."""
        self.rest = max(0, self.rest - steps)
