"""The controller of drafts for a server, alone and where replies share passes, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import pytest

from edgeinfer.runtime.decoding.shares import VERIFIED_ROWS, DraftAdvice, draft_advice, draft_rows
from edgeinfer.runtime.profile.costs import PassCosts, RanPasses
from edgeinfer.runtime.remote.channel import Channel, Prices


@dataclass
class SimulatedWay:
    """A link, a server and a drafter, by what they take."""

    # `rtt_ms`, `mbits`: of the link.
    rtt_ms: float = 0.0
    mbits: float = 100.0
    pass_ms: Callable[[int], float] = lambda rows: 13.3 + 1.3 * (rows - 1)  # of the server, by rows
    draft_ms: float = 0.3  # of a drafted token
    accepted: float = 0.73  # chance that a drafted token is the server's
    disturbed: float = 0.0  # chance that a pass takes three times as long, as other programs are at work
    token_ms: float = 0.0  # of a streamed token besides its pass
    seed: int = 0  # of all chances
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def wire_ms(self, size: float) -> float:
        """Milliseconds for these bytes."""
        return size * 8 / (self.mbits * 1e3)

    def server_ms(self, rows: int) -> float:
        """Milliseconds of one pass."""
        return self.pass_ms(rows) * (3 if self.chance.random() < self.disturbed else 1)

    def streaming_ms(self, tokens: int) -> float:
        """What so many tokens take in the midst of a plain stream."""
        each = self.pass_ms(1) * (1 + 2 * self.disturbed) + self.token_ms
        return tokens * max(each, self.wire_ms(40))

    def local_ms(self, tokens: int) -> float:
        """What the server's model takes for so many tokens on this machine."""
        return tokens * self.pass_ms(1) * (1 + 2 * self.disturbed)


@dataclass(frozen=True)
class Asked:
    """Rows that a server is asked for."""

    at_ms: float  # when it has the request, or goes on with the stream
    draft: int | None  # tokens of a round; None is the next token of a stream


@dataclass(frozen=True)
class Answered:
    """What a server answers."""

    at_ms: float  # when it does
    verified: int = 0  # tokens of the draft that it looked at
    advice: DraftAdvice | None = None  # as `Channel.joins` takes it


Steps = Generator[Asked, Answered, None]


class SimulatedReplies:
    """Decodes replies as `RemoteDecoding` does, by what a channel says."""

    def __init__(self, way: SimulatedWay, channel: Channel) -> None:
        self.way, self.channel = way, channel
        self.now_ms = 0.0  # the time
        self.times: list[float] = []  # when each token came, in milliseconds
        self.drafted = 0  # tokens, those that were drafted ahead included
        self._agreeing = 0  # drafts there are, all of them made ahead
        self._streamed = False  # so the connection must be made again

    def reply(self, tokens: int) -> float:
        """One reply of so many tokens, by a server that has no other; its milliseconds."""
        way, began, steps = self.way, self.now_ms, self.steps(tokens)
        asked = next(steps, None)
        while asked is not None:
            if asked.draft is None:
                took = max(way.server_ms(1) + way.token_ms, way.wire_ms(40))
            else:
                took = way.server_ms(1 + asked.draft)
            asked = _sent(steps, Answered(asked.at_ms + took, asked.draft or 0))
        return self.now_ms - began

    def steps(self, tokens: int) -> Steps:
        """One reply of so many tokens, by what it asks of a server."""
        wanted, first, self._agreeing, self._streamed = len(self.times) + tokens, True, 0, False
        while len(self.times) < wanted:
            length = self.channel.length()
            if length is None:
                yield from self._stream(wanted - len(self.times))
            else:
                yield from self._round(min(length, wanted - len(self.times) - 1), first)
            first = False

    def _round(self, length: int, first: bool) -> Steps:
        way, started = self.way, self.now_ms
        made = max(0, length - self._agreeing)
        for _ in range(made):
            self.channel.drafted(way.draft_ms)
        self.drafted += made
        self.now_ms += made * way.draft_ms
        link = way.rtt_ms + way.wire_ms(900 + 6 * length) + self._connecting()
        answered = yield Asked(self.now_ms + link / 2, length)
        server, verified = answered.at_ms - self.now_ms - link / 2, answered.verified
        ahead = max(0, min(1 + self.channel.ahead(), int((link + server) / way.draft_ms)))
        self.drafted += ahead
        self.now_ms += link + server
        agreed = 0
        while agreed < verified and way.chance.random() < way.accepted:
            agreed += 1
        came = agreed + 1
        drafts = length - verified + ahead  # that follow, if this token is the first of them
        foretold = agreed == verified and drafts > 0 and way.chance.random() < way.accepted
        self._agreeing = drafts - 1 if foretold else 0
        self.channel.joins(answered.advice)
        if not first:
            self.channel.verified(verified, server, link + server)
        self.channel.judged(agreed + (foretold and verified < length), min(length, came))
        if not first:
            self.channel.went(verified, came, self.now_ms - started)
        self.times += [self.now_ms] * came

    def _stream(self, most: int) -> Steps:
        way = self.way
        most = min(most, self.channel.tokens_of_stream() or most)
        link = way.rtt_ms + way.wire_ms(900) + self._connecting()
        at = self.now_ms + link / 2
        for number in range(most):
            answered = yield Asked(at, None)
            took, at = answered.at_ms - at, answered.at_ms
            self.now_ms = at + link / 2
            self.times.append(self.now_ms)
            if self.channel.compares:
                self.channel.drafted(way.draft_ms)
                self.drafted += 1
                self.channel.judged(int(way.chance.random() < way.accepted), 1)
            self.channel.joins(answered.advice)
            if number:
                self.channel.streamed(1, took)
            if number + 1 < most and self.channel.leaves():
                self._streamed = True
                return

    def _connecting(self) -> float:
        made, self._streamed = self._streamed, False
        return self.way.rtt_ms if made else 0.0


class SimulatedServer:
    """Evaluates in one pass, as the scheduler does, what has come until the one before is over.

    Args:
        way: its passes, and how many drafted tokens it expects to accept.
        round_ms, event_ms: processor time of a round's request and of a streamed token, besides passes.
    """

    def __init__(self, way: SimulatedWay, *, round_ms: float, event_ms: float) -> None:
        self.way = way
        self._round_ms, self._event_ms = round_ms, event_ms
        self.processor_ms = 0.0  # that was spent
        self.cut = 0  # rounds of whose drafts a part was not looked at

    def streaming_ms(self, devices: int) -> float:
        """Processor time of a token of each of so many devices that stream."""
        return self.way.pass_ms(devices) + devices * self._event_ms

    def serve(self, replies: Sequence[Steps]) -> None:
        """Answers until all replies are over."""
        coming = [(asked.at_ms, place, asked) for place, steps in enumerate(replies) if (asked := next(steps, None))]
        heapq.heapify(coming)
        going_on = {place for _, place, _ in coming}
        now = 0.0
        while coming:
            now, come = max(now, coming[0][0]), list[tuple[int, Asked]]()
            while coming and coming[0][0] <= now:
                come.append(heapq.heappop(coming)[1:])
            rows = self._rows([asked for _, asked in come])
            took = self.way.pass_ms(sum(rows))
            took += sum(self._event_ms if asked.draft is None else self._round_ms for _, asked in come)
            self.processor_ms, now = self.processor_ms + took, now + took
            advice = None if len(going_on) < 2 else self._advice(len(going_on))
            for (place, _), count in zip(come, rows, strict=True):
                asked = _sent(replies[place], Answered(now, count - 1, advice))
                if asked is None:
                    going_on.remove(place)
                else:
                    heapq.heappush(coming, (asked.at_ms, place, asked))

    def _advice(self, devices: int) -> DraftAdvice:
        return draft_advice(devices, self.way.accepted, self.way.pass_ms, VERIFIED_ROWS)

    def _rows(self, come: Sequence[Asked]) -> list[int]:
        whole = [1 + (asked.draft or 0) for asked in come]
        if len(come) == 1:
            return whole
        rows = draft_rows([[self.way.accepted**at for at in range(size)] for size in whole], self.way.pass_ms, 64)
        self.cut += sum(count < size for count, size in zip(rows, whole, strict=True))
        return rows


def _sent(steps: Steps, answered: Answered) -> Asked | None:
    """What a reply asks for next; None where it is over."""
    try:
        return steps.send(answered)
    except StopIteration:
        return None


# Round trips in milliseconds, and millions of bits in a second.
LINKS = (*((rtt, 100.0) for rtt in (0.0, 1.0, 5.0, 20.0, 50.0, 200.0)), (5.0, 1.0), (5.0, 10.0), (50.0, 1.0))
# Tokens in which a controller that knows nothing learns.
LEARNING, TOKENS = 64, 500


def speed(seed: int, **way: float) -> tuple[float, SimulatedReplies]:
    """How much faster the tokens after the first ones come than by the better of streaming and local decoding."""
    simulated = SimulatedWay(seed=seed, **way)  # type: ignore[arg-type]  # numbers alone
    replies = SimulatedReplies(simulated, Channel(32))
    replies.reply(TOKENS)
    left = len(replies.times) - LEARNING
    best = min(simulated.streaming_ms(left), simulated.local_ms(left))
    return best / (replies.times[-1] - replies.times[LEARNING - 1]), replies


@pytest.mark.parametrize("accepted", [0.3, 0.73, 0.95])
@pytest.mark.parametrize("draft_ms", [0.3, 4.0])
def test_no_link_makes_it_slower_than_the_better_way(accepted: float, draft_ms: float) -> None:
    for rtt, rate in LINKS:
        speeds = [speed(seed, rtt_ms=rtt, mbits=rate, accepted=accepted, draft_ms=draft_ms)[0] for seed in range(3)]
        assert fmean(speeds) >= 0.97 and min(speeds) >= 0.94, (rtt, rate, speeds)


def test_drafts_pay_on_near_links() -> None:
    for rtt in (0.0, 1.0, 5.0):
        assert fmean(speed(seed, rtt_ms=rtt, accepted=0.95)[0] for seed in range(3)) > 2.5
    assert fmean(speed(seed, rtt_ms=1.0, accepted=0.73)[0] for seed in range(3)) > 1.5


def test_other_work_beside_passes_is_not_taken_for_their_cost() -> None:
    for seed in range(3):
        faster, _ = speed(seed, rtt_ms=1.0, accepted=0.9, disturbed=0.1)
        assert faster > 1.8


def test_a_link_that_turns_slow_is_left_to_the_stream_and_one_that_recovers_is_used() -> None:
    way = SimulatedWay(rtt_ms=1.0, accepted=0.9)
    replies = SimulatedReplies(way, Channel(32))
    replies.reply(200)
    near = replies.reply(200)
    way.rtt_ms = 200.0
    replies.reply(100)
    assert replies.reply(400) <= (200 + way.streaming_ms(400)) / 0.97
    way.rtt_ms = 1.0
    for _ in range(20):
        replies.reply(200)
    assert replies.reply(200) < 1.3 * near


def test_a_stream_that_was_chosen_goes_on_without_further_requests() -> None:
    way = SimulatedWay(rtt_ms=200.0, accepted=0.6)
    replies = SimulatedReplies(way, Channel(32))
    replies.reply(100)
    assert replies.reply(48) == pytest.approx(way.rtt_ms + way.wire_ms(900) + way.streaming_ms(48), rel=0.01)


def test_energy_has_a_price() -> None:
    def drafted(prices: Prices) -> int:
        replies = SimulatedReplies(SimulatedWay(rtt_ms=1.0, accepted=0.8), Channel(32, prices))
        replies.reply(400)
        return replies.drafted

    free, dear, dearest = (drafted(Prices(draft=price)) for price in (0.0, 1.0, 50.0))
    assert free > 1.3 * dear > 1.3 * dearest
    # Rounds send more bytes than streams.
    assert drafted(Prices(kilobyte=1_000.0)) < 0.5 * free


DEVICES, SHARED_LEARNING, SHARED_TOKENS = 8, 128, 96


def arithmetic_bound(rows: int) -> float:
    """Passes as a CPU of two cores takes them over a 0.5B in 4 bits: from eight rows on each costs a tenth of one."""
    return 21.0 + min(rows, 8) - 1 + 2.3 * max(0, rows - 8)


def memory_bound(rows: int) -> float:
    """Passes of a server that computes faster than it reads weights."""
    return 21.0 + 0.3 * (rows - 1)


def processor_ms(pass_ms: Callable[[int], float], accepted: float, seed: int) -> tuple[float, SimulatedServer]:
    """Times of a token on devices that draft as they like, relative to devices that stream."""
    ways = [
        SimulatedWay(rtt_ms=0.2, pass_ms=pass_ms, accepted=accepted, draft_ms=1.0, seed=seed * 100 + device)
        for device in range(DEVICES)
    ]
    replies = [SimulatedReplies(way, Channel(32)) for way in ways]
    for tokens in (SHARED_LEARNING, SHARED_TOKENS):
        for reply in replies:
            reply.now_ms = 0.0
        server = SimulatedServer(ways[0], round_ms=3.7, event_ms=0.9)
        server.serve([reply.steps(tokens) for reply in replies])
    tokens = sum(len(reply.times) for reply in replies) - DEVICES * SHARED_LEARNING
    return server.processor_ms / tokens / (server.streaming_ms(DEVICES) / DEVICES), server


@pytest.mark.slow
@pytest.mark.parametrize("accepted", [0.3, 0.65, 0.87])
def test_devices_in_company_cost_the_server_what_streams_do(accepted: float) -> None:
    replies = [processor_ms(arithmetic_bound, accepted, seed) for seed in range(2)]
    # 1.2 to 1.6 where drafts are not cut; 1.02 to 1.08 where devices are not advised to stream.
    assert fmean(share for share, _ in replies) < 1.03


@pytest.mark.slow
def test_devices_in_company_draft_where_rows_are_cheap() -> None:
    assert fmean(processor_ms(memory_bound, 0.65, seed)[0] for seed in range(2)) < 1.05
    assert fmean(processor_ms(memory_bound, 0.87, seed)[0] for seed in range(2)) < 0.98


def test_a_cut_draft_tells_nothing_of_what_was_not_looked_at() -> None:
    channel = Channel(32)
    channel.drafted(0.1)
    for _ in range(50):
        channel.joins(DraftAdvice(25.0, 2))
        channel.verified(2, 20.0, 21.0)
        channel.judged(3, 3)
        channel.went(2, 3, 21.0)
    assert channel.acceptance > 0.95
    assert channel.length() == 2
    channel.joins(None)
    alone = channel.length()
    assert alone is not None and alone > 8


def test_a_server_that_makes_drafts_too_dear_has_them_streamed() -> None:
    channel = Channel(32)
    channel.drafted(0.1)
    for _ in range(2):
        channel.verified(4, 20.0, 21.0)
        channel.judged(4, 4)
        channel.went(4, 5, 21.0)
    assert channel.length()
    channel.joins(DraftAdvice(28.0, 0))
    assert channel.length() is None
    # As long as it says so, whatever is measured.
    for _ in range(304):
        assert not channel.leaves()
        channel.joins(DraftAdvice(28.0, 0))
        channel.streamed(1, 60.0)
    channel.joins(None)
    assert channel.leaves()


def test_what_is_best_in_company_counts_what_rounds_take_besides_rows() -> None:
    def pass_ms(rows: int) -> float:
        return 20.0 + rows

    def best(replies: int, acceptance: float) -> int:
        return draft_advice(replies, acceptance, pass_ms, VERIFIED_ROWS).draft_tokens

    assert draft_advice(8, 0.7, pass_ms, VERIFIED_ROWS).stream_ms > pass_ms(8)
    assert best(2, 0.9) >= best(8, 0.9) > 0
    assert best(8, 0.9) * 8 <= VERIFIED_ROWS
    # Half as many tokens again for a pass of as many more rows, and rounds.
    assert best(8, 0.5) == 0 and best(8, 0.0) == 0 and best(VERIFIED_ROWS + 1, 1.0) == 0


def test_passes_that_were_never_measured_are_known_by_those_that_ran() -> None:
    ran, measured = RanPasses(), PassCosts(((1, 10.0), (4, 12.0)))
    assert ran.beyond(None) is None and ran.beyond(measured) is not None
    for rows, ms in ((2, 30.0), (2, 11.0), (16, 24.0), (16, 90.0), (32, 40.0)):
        ran.observe(rows, ms)
    alone, further = ran.beyond(None), ran.beyond(measured)
    assert alone is not None and further is not None
    assert [alone.ms(rows) for rows in (2, 16, 24, 32)] == [11, 24, 32, 40]
    # What was measured stands.
    assert [further.ms(rows) for rows in (1, 2, 4, 10, 32)] == pytest.approx([10, 10 + 2 / 3, 12, 18, 40])
    ran.observe(16, 20.0)
    faster = ran.beyond(None)
    assert faster is not None and faster.ms(16) == 20
