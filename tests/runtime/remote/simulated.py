"""Replies that a verifier elsewhere decides, in simulated time, beside plain streaming and local decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from edgeinfer.runtime.remote.channel import Channel


@dataclass
class SimulatedWay:
    """A link, a server and a drafter, by what they take.

    Attributes:
        rtt_ms, mbits: of the link.
        pass_ms: of the server, by rows.
        draft_ms: of a drafted token.
        accepted: chance that a drafted token is the server's.
        disturbed: chance that a pass takes three times as long, as other programs are at work.
        token_ms: of a streamed token besides its pass.
        seed: of all chances.
    """

    rtt_ms: float = 0.0
    mbits: float = 100.0
    pass_ms: Callable[[int], float] = lambda rows: 13.3 + 1.3 * (rows - 1)
    draft_ms: float = 0.3
    accepted: float = 0.73
    disturbed: float = 0.0
    token_ms: float = 0.0
    seed: int = 0
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def wire_ms(self, size: float) -> float:
        """Of so many bytes."""
        return size * 8 / (self.mbits * 1e3)

    def server_ms(self, rows: int) -> float:
        """Of one pass, as it goes."""
        return self.pass_ms(rows) * (3 if self.chance.random() < self.disturbed else 1)

    def streaming_ms(self, tokens: int) -> float:
        """What so many tokens take in the midst of a plain stream."""
        each = self.pass_ms(1) * (1 + 2 * self.disturbed) + self.token_ms
        return tokens * max(each, self.wire_ms(40))

    def local_ms(self, tokens: int) -> float:
        """What the server's model takes for so many tokens on this machine."""
        return tokens * self.pass_ms(1) * (1 + 2 * self.disturbed)


class SimulatedReplies:
    """Decodes replies as `RemoteDecoding` does, by what a channel says.

    Attributes:
        now_ms: the time.
        times: when each token came, in milliseconds.
        drafted: tokens, those that were drafted ahead included.
    """

    def __init__(self, way: SimulatedWay, channel: Channel) -> None:
        self.way, self.channel = way, channel
        self.now_ms = 0.0
        self.times: list[float] = []
        self.drafted = 0
        self._agreeing = 0  # drafts there are, all of them made ahead
        self._streamed = False  # so the connection must be made again

    def reply(self, tokens: int) -> float:
        """One reply of so many tokens; its milliseconds."""
        began, wanted = self.now_ms, len(self.times) + tokens
        first, self._agreeing, self._streamed = True, 0, False
        while len(self.times) < wanted:
            length = self.channel.length()
            if length is None:
                self._stream(wanted - len(self.times))
            else:
                self._round(min(length, wanted - len(self.times) - 1), first)
            first = False
        return self.now_ms - began

    def _round(self, length: int, first: bool) -> None:
        way, begun = self.way, self.now_ms
        made = max(0, length - self._agreeing)
        for _ in range(made):
            self.channel.drafted(way.draft_ms)
        self.drafted += made
        self.now_ms += made * way.draft_ms
        server = way.server_ms(1 + length)
        link = way.rtt_ms + way.wire_ms(900 + 6 * length) + self._connecting()
        ahead = max(0, min(1 + self.channel.ahead(), int((link + server) / way.draft_ms)))
        self.drafted += ahead
        self.now_ms += link + server
        agreed = 0
        while agreed < length and way.chance.random() < way.accepted:
            agreed += 1
        came = agreed + 1
        foretold = agreed == length and ahead > 0 and way.chance.random() < way.accepted
        self._agreeing = ahead - 1 if foretold else 0
        if first:
            self.channel.judged(agreed, min(length, agreed + 1))
        else:
            self.channel.verified(length, agreed, server, link + server)
            self.channel.went(length, came, self.now_ms - begun)
        self.times += [self.now_ms] * came

    def _stream(self, most: int) -> None:
        way = self.way
        most = min(most, self.channel.tokens_of_stream() or most)
        self.now_ms += way.rtt_ms + way.wire_ms(900) + self._connecting()
        for number in range(most):
            took = max(way.server_ms(1) + way.token_ms, way.wire_ms(40))
            self.now_ms += took
            self.times.append(self.now_ms)
            if self.channel.compares:
                self.channel.drafted(way.draft_ms)
                self.drafted += 1
                self.channel.judged(int(way.chance.random() < way.accepted), 1)
            if number:
                self.channel.streamed(1, took)
            if number + 1 < most and self.channel.leaves():
                self._streamed = True
                return

    def _connecting(self) -> float:
        made, self._streamed = self._streamed, False
        return self.way.rtt_ms if made else 0.0
