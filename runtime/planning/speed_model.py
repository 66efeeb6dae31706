"""How fast a configuration decodes, by costs measured on this device or a stated guess."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from edgeinfer.bundle.geometry import FLOAT32, Geometry
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.planning.plan_input import Configuration
from edgeinfer.runtime.profile.costs import PassCosts, Prospect, asking_ms, asking_pays, decoding_rate
from edgeinfer.runtime.weights.experts import ExpertBytes
from edgeinfer.runtime.weights.streaming import Run, dropped_windows, window_bytes

# A turn of a chat, by which configurations are compared: so many new tokens of prompt, so many of reply.
TURN_TOKENS, REPLY_TOKENS = 64, 128
# Of a round that drafts, besides its pass (docs/log/2026-11-21.md).
ROUND_MS = 0.3
# Of a token besides its round, before it was measured: choosing it, its text and its figures; and of each token of the
# vocabulary it is chosen from (docs/log/2026-11-26.md).
_TOKEN_MS, _CHOICE_MS = 0.12, 1.8e-6
# Of a token where drafters are asked in vain: looking up what they would guess, the controller's part of a plain step,
# and what is learnt at a reply's end (docs/log/2026-11-26.md, sixth).
_IN_VAIN_MS = 0.05
# Of a pass: rounds that take no less than this share give a token each.
_PLAIN = 1 - 1e-6
# Bytes of weights that a core of a laptop reads per millisecond, and what each further row adds to a pass: what is
# reckoned with until the device was measured (docs/log/2026-11-21.md: 9 to 34 GB/s, 5% to 15% a row).
_READ_PER_MS = 12_000_000
_ROW_SHARE = 0.12
# Bytes that the system drops too early, and reads again, for each that it has no room for: of what is read again and
# again in one order, and of experts, which are not (docs/log/2026-11-27.md, and 2026-11-26, fifth).
_DROPPED_EARLY, _EXPERTS_DROPPED_EARLY = 3.0, 1.4
# Bytes a second that a disk is taken to give until it was measured: an SSD's.
_USUAL_DISK_RATE = 1e9
# Milliseconds that nothing takes less than.
LEAST_MS = 0.2
# Nanoseconds of a value of the cache by its type: when it is written, and when a row attends to it (docs/log,
# 2026-11-26, third). Four bits are written slowly, as nine ranges are tried for each 16 values.
_CACHE_NS = {FLOAT32: (0.0, 0.19), "float16": (0.3, 0.16), "int8": (6.0, 0.07), "int4": (28.0, 0.27)}
# Rows that are in the cache when passes are timed.
_TIMED_PAST = 64


@dataclass(frozen=True)
class Speed:
    """A predicted pace of a text that was never seen."""

    tokens_per_second: float  # of a reply, as expected with drafts
    turn_ms: float  # a turn of 64 prompt tokens and 128 of reply
    measured: bool  # whether it rests on passes timed on this device
    plain_tokens_per_second: float  # of a reply without drafts

    def at_most(self, other: Speed) -> Speed:
        """Limit the speed to another's."""
        paces = ("tokens_per_second", "plain_tokens_per_second")
        return replace(self, **{name: min(getattr(self, name), getattr(other, name)) for name in paces})


@dataclass(frozen=True)
class Pace:
    """What is known of a device and a model before it is loaded."""

    passes: PassCosts  # c(m)
    measured: bool  # whether they were timed here, or guessed from the size of the weights
    round_ms: float  # of a round that drafts, besides its pass
    prospects: Sequence[Prospect]  # of the drafters that "auto" asks, in the order in which it asks them
    token_ms: float = 0.0  # of a token besides its round


@dataclass(frozen=True)
class DiskReads:
    """What passes read from the disk, as the system has no room to keep all weights in memory."""

    rate: float | None  # bytes a second that it gives; None where it has not been measured
    always: int  # bytes of weights that every pass reads
    experts: ExpertBytes
    # Where each layer's weights lie in their file; none where the system's cache drops no windows.
    layers: tuple[Run, ...] = ()
    room: int = 0  # bytes of weights that the system can keep

    @property
    def weights(self) -> int:
        return self.always + self.experts.total

    @property
    def taken_rate(self) -> float:
        """The measured rate, or a guess."""
        return self.rate or _USUAL_DISK_RATE

    def pass_bytes(self, configuration: Configuration, rows: int) -> float:
        """Bytes that a pass over so many rows reads."""
        c, experts = configuration, self.experts.needed(rows)
        if 0 < c.window_layers < len(self.layers):
            sizes = window_bytes(self.layers, c.window_layers, c.kept_layers)
            dropped = dropped_windows(sizes, self.weights, self.room)
            return self.weights if dropped is None else sum(sizes[each] for each in dropped)
        early = _DROPPED_EARLY
        if c.expert_bytes:
            experts *= 1 - c.expert_bytes / self.experts.total
            early = _EXPERTS_DROPPED_EARLY
        return min(1.0, early * (1 - self.room / self.weights)) * (self.always + experts)

    def pass_ms(self, configuration: Configuration, rows: int) -> float:
        return 1e3 * self.pass_bytes(configuration, rows) / self.taken_rate


def guessed_token_ms(vocabulary: int) -> float:
    """Guess the milliseconds of a token besides its round."""
    return _TOKEN_MS + _CHOICE_MS * vocabulary


def cache_ms(geometry: Geometry, kv: str) -> float:
    """Milliseconds of the cache's writes and reads for a row of a timed pass; unknown types count as the usual one."""
    values = geometry.kv_bytes_per_token(FLOAT32) / 4
    written, read = _CACHE_NS.get(kv, _CACHE_NS[FLOAT32])
    return values * (written + _TIMED_PAST * read) / 1e6


def guessed_passes(weight_bytes: int, expert_bytes: Callable[[int], float] = lambda rows: 0.0) -> PassCosts:
    """Guess c(m) of a model that never ran here."""

    def ms(rows: int) -> float:
        return max(LEAST_MS, (weight_bytes + expert_bytes(rows)) / _READ_PER_MS)

    return PassCosts(tuple((rows, ms(rows) + ms(1) * _ROW_SHARE * (rows - 1)) for rows in (1, 2, 4, 8, 16, 32)))


class SpeedModel:
    """Predicts the pace of configurations of one model. `disk` is what passes read if weights do not stay in memory,
    `room` the bytes of weights that do; None where all stay."""

    def __init__(
        self,
        pace_of: Callable[[Configuration], Pace],
        disk: DiskReads | None = None,
        room: Callable[[Configuration], int] | None = None,
    ) -> None:
        self._pace_in_memory = pace_of
        self._disk = disk
        self._room = room
        self._rounds: dict[Hashable, tuple[float, float]] = {}

    def speed(self, configuration: Configuration) -> Speed:
        pace = self._pace_of(configuration)
        round_ms, in_vain_ms = self._round_ms(pace, configuration)
        token_ms = round_ms + pace.token_ms
        chunk = min(configuration.prefill_chunk, TURN_TOKENS)
        prompt_ms = -(-TURN_TOKENS // chunk) * _chunk_ms(pace, chunk)
        turn_ms = prompt_ms + REPLY_TOKENS * token_ms
        # Asking in vain does not decide who drafts: texts that repeat themselves are not foreseen, and pay for it many
        # times.
        plain = 1e3 / (pace.passes.ms(1) + pace.token_ms)
        return Speed(1e3 / (token_ms + in_vain_ms), turn_ms, pace.measured, plain)

    def disk(self, configuration: Configuration) -> DiskReads | None:
        """Disk reads of a configuration's passes; None if all weights stay in memory."""
        # What is packed was copied from the file.
        if self._disk is None or self._room is None or configuration.weights == "packed":
            return None
        room = max(0, self._room(configuration))
        return replace(self._disk, room=room) if room < self._disk.weights else None

    def within(self, room: Callable[[Configuration], int]) -> SpeedModel:
        """A model of speeds where the system can keep only some bytes of weights."""
        return SpeedModel(self._pace_in_memory, self._disk, room)

    def _pace_of(self, configuration: Configuration) -> Pace:
        pace, disk = self._pace_in_memory(configuration), self.disk(configuration)
        if disk is None:
            return pace
        points = []
        for rows, ms in pace.passes.points:
            disk_ms = disk.pass_ms(configuration, rows)
            # Passes that were timed here may have read as much.
            points.append((rows, max(ms, disk_ms) if pace.measured else ms + disk_ms))
        measured = pace.measured and disk.rate is not None
        return replace(pace, passes=PassCosts(tuple(points), pace.passes.step), measured=measured)

    def _round_ms(self, pace: Pace, configuration: Configuration) -> tuple[float, float]:
        """Milliseconds of rounds per token where drafting is used wherever it pays, and of asking in vain where it
        never does."""
        names, draft_model, most = configuration.drafters, configuration.draft_model, configuration.draft_max
        # Thousands of configurations differ only in what no token depends on.
        c = configuration
        where = c.weights, c.window_layers, c.kept_layers, c.expert_bytes, c.gpu_layers
        room = None if self._room is None else self._room(configuration)
        key = configuration.kv, where, names, draft_model, most, room
        if key not in self._rounds:
            asked = [each for each in pace.prospects if each.drafter in names and (draft_model or not each.model)]
            pass_ms = [pace.passes.ms(rows) for rows in range(1, most + 2)]
            round_ms = 1 / decoding_rate(asked if most else (), pass_ms, pace.round_ms)
            asks = bool(names) and most > 0 and asking_pays(asking_ms(asked, pace.round_ms), pass_ms[0])
            in_vain = asks and round_ms >= _PLAIN * pass_ms[0]
            self._rounds[key] = round_ms, _IN_VAIN_MS if in_vain else 0.0
        return self._rounds[key]


def _chunk_ms(pace: Pace, chunk: int) -> float:
    """Milliseconds of a prompt chunk; beyond measured sizes a row costs what it does in the largest."""
    largest = pace.passes.largest
    return pace.passes.ms(chunk) if chunk <= largest else pace.passes.ms(largest) * chunk / largest
