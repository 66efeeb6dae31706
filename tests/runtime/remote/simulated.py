"""Replies that a verifier elsewhere decides, in simulated time: of one device, or of several on one server."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from edgeinfer.runtime.decoding.shares import VERIFIED_ROWS, DraftAdvice, draft_advice, draft_rows
from edgeinfer.runtime.remote.channel import Channel


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
