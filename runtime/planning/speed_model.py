"""How fast a configuration decodes, by costs measured on this device or a stated guess."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from edgeinfer.bundle.geometry import FLOAT32, Geometry
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.planning.candidates import weights_ways
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration
from edgeinfer.runtime.profile.costs import PassCosts, Prospect, asking_ms, asking_pays, decoding_rate, prospects_by
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.profile.drafting import DRAFTED, TunedDrafting, drafter_records
from edgeinfer.runtime.weights.disk_rate import kept_rate
from edgeinfer.runtime.weights.experts import ExpertBytes
from edgeinfer.runtime.weights.streaming import (
    Run,
    dropped_windows,
    layer_runs,
    pass_bytes,
    reread_ms,
    window_bytes,
)

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

    def timed(self, ms: Callable[[int, float], float]) -> Pace:
        """This pace with other milliseconds of passes, of their rows and what they take now."""
        points = tuple((rows, ms(rows, each)) for rows, each in self.passes.points)
        return replace(self, passes=PassCosts(points, self.passes.step))


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
        measured, read = pace.measured and disk.rate is not None, functools.partial(disk.pass_ms, configuration)
        # Passes that were timed here may have read as much.
        slowed = pace.timed(lambda rows, ms: max(ms, read(rows)) if pace.measured else ms + read(rows))
        return replace(slowed, measured=measured)

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


class Profiles(Protocol):
    """Opens what was measured and learnt of one way of running a model on this device."""

    def __call__(self, variant: str, *, draft_model: bool) -> DeviceProfile:
        """The profile of a variant, with or without the draft model."""


def speed_model(facts: BundleFacts, profiles: Profiles) -> SpeedModel:
    """Predicts the pace of a model from what is known of it on this device.

    All speeds rest on one reference: the usual variant where it was measured, another where only that was, less what it
    reads again, or a guess. So does what drafts are expected to do, of which no variant knows more. A variant that
    never ran here is taken to run as the reference; streaming adds what the bytes that it reads again take, another
    type of cache what its rows take. Of experts those are the share that is not in memory, as if all were chosen alike.
    """
    tensors = tensors_in(facts.manifest, facts.layout)
    experts = ExpertBytes.of(facts.manifest.decoder, tensors)
    geometry, pages = facts.manifest.geometry, pass_bytes(tensors)
    arrays = sum(find_expert(t.name) is None for t in tensors)
    read = _Read(pages, layer_runs(tensors), arrays, pass_bytes(t for t in tensors if t.name == "head"))
    known: dict[tuple[str, bool], Pace] = {}

    @functools.cache
    def pace(variant: str, draft_model: bool) -> Pace:
        return _pace(facts, profiles(variant, draft_model=draft_model), experts)

    def again_ms(configuration: Configuration, rows: int) -> float:
        """Milliseconds that reading weights again adds to a pass."""
        kept, needed = configuration.expert_bytes, experts.needed(rows)
        if configuration.window_layers:
            return _streamed_again_ms(configuration, read, (pages - experts.total + needed) / pages)
        return reread_ms((1 - kept / experts.total) * needed) if kept else 0.0

    usual_kv, reference, best = _reference(facts, pace, again_ms)

    def pace_of(configuration: Configuration) -> Pace:
        key = facts.variant(configuration), configuration.draft_model
        if key not in known:
            variant, draft_model = key
            # A draft model in memory changes what passes cost less than anything else does.
            near = next((each for each in (key, (variant, not draft_model)) if pace(*each).measured), None)
            own = best if near is None else pace(*near)
            row_ms = cache_ms(geometry, configuration.kv) - cache_ms(geometry, usual_kv)
            if near is None:
                own = own.timed(lambda rows, ms: max(LEAST_MS, ms + rows * row_ms) + again_ms(configuration, rows))
            elif best.measured:
                rereads = configuration.window_layers > 0 or configuration.expert_bytes > 0
                own = _scaled(own, max(LEAST_MS, best.passes.ms(1) + row_ms), rereads=rereads)
            # Choosing a token takes the same in all variants, so one of them decides for all.
            token_ms = _token_ms(facts, [profiles(v, draft_model=d) for v, d in (reference, near or reference)])
            known[key] = replace(own, measured=near == key, prospects=best.prospects, token_ms=token_ms)
        return known[key]

    rate = kept_rate(facts.weights_place or facts.bundle.path)
    # Packed layers are scattered over their file, so what goes of them is left to the system, as of mapped weights.
    layers = read.layers if facts.layout == NATIVE else ()
    return SpeedModel(pace_of, DiskReads(rate, pages - experts.total, experts, layers))


class _Read(NamedTuple):
    """What passes read of the weights: bytes in all, places of the layers, arrays but those of experts, and bytes of
    the head."""

    bytes: int
    layers: tuple[Run, ...]
    arrays: int
    head: int


def _streamed_again_ms(configuration: Configuration, read: _Read, share: float) -> float:
    """Milliseconds that reading streamed weights again adds; `share` is of all bytes, without experts not chosen."""
    layers, window, kept = len(read.layers), configuration.window_layers, configuration.kept_layers
    if kept:
        sizes = window_bytes(read.layers, window, kept)
        return reread_ms(sum(sizes) * share, round((1 - kept / layers) * read.arrays), len(sizes) * layers)
    if window >= layers:
        return reread_ms(read.head)
    # The embedding and the head are windows of their own.
    windows = 2 + -(-layers // window)
    return reread_ms(read.bytes * share, read.arrays, windows * layers)


def _reference(
    facts: BundleFacts, pace: Callable[[str, bool], Pace], again_ms: Callable[[Configuration, int], float]
) -> tuple[str, tuple[str, bool], Pace]:
    """The reference of all speeds: a cache type, a variant, and its pace without reading weights again."""
    for kv, key in _resident(facts):
        if pace(*key).measured:
            return kv, key, pace(*key)
    for each in _rereading(facts):
        key = facts.variant(each), each.draft_model
        if pace(*key).measured:
            return each.kv, key, _without(pace(*key), functools.partial(again_ms, each))
    usual = "", facts.drafter is not None
    return facts.kv_types[0], usual, pace(*usual)


def _without(pace: Pace, again_ms: Callable[[int], float]) -> Pace:
    return pace.timed(lambda rows, ms: max(LEAST_MS, ms - again_ms(rows)))


def _resident(facts: BundleFacts) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Cache types and variants with all weights in memory, the usual first, each with and without a draft model."""
    modes = [mode for mode in facts.weights_modes if mode not in ("streamed", "experts")]
    for kv, weights in itertools.product(facts.kv_types, modes):
        for draft_model in (True, False) if facts.drafter is not None else (False,):
            yield kv, (facts.variant_of(kv, weights), draft_model)


def _rereading(facts: BundleFacts) -> Iterator[Configuration]:
    """Configurations that read weights again, those that read least first."""
    ways = [way for way in weights_ways(facts, LoadOptions()) if way.window_layers or way.expert_bytes]
    for kv, way in itertools.product(facts.kv_types, ways):
        for draft_model in (True, False) if facts.drafter is not None else (False,):
            c = Configuration(1, 1, kv, way.mode, way.window_layers, (), 0, facts.tokenizer, way.expert_bytes)
            yield replace(c, kept_layers=way.kept_layers, draft_model=draft_model)


def _scaled(own: Pace, row_ms: float, *, rereads: bool) -> Pace:
    """A variant's pace as if it had been measured together with the usual one's. Two measurements on different days may
    differ by more than two variants do. So only what further rows cost is the variant's own; reading again is never
    faster."""
    scale = row_ms / own.passes.ms(1)
    if rereads:
        scale = max(1.0, scale)
    return own.timed(lambda rows, ms: ms * scale)


def _token_ms(facts: BundleFacts, profiles: Sequence[DeviceProfile]) -> float:
    """Milliseconds of a token besides its round, by the first profile that has them, or a guess."""
    for profile in profiles:
        costs = profile.costs()
        if costs is not None and costs.drafts.token_ms is not None:
            return costs.drafts.token_ms
    return guessed_token_ms(facts.manifest.geometry.vocab_size)


def _pace(facts: BundleFacts, profile: DeviceProfile, experts: ExpertBytes) -> Pace:
    costs, options, manifest = profile.costs(), facts.option_bytes, facts.manifest
    passes = costs.passes if costs else guessed_passes(manifest.weight_bytes - experts.total, experts.needed)
    assert options is not None, "whoever plans a target says what drafters promise"
    priors = options.priors(facts, TunedDrafting.of(profile, manifest.geometry.num_layers))
    records = drafter_records(profile.arrays(DRAFTED), priors)
    prospects = prospects_by(priors, passes.ms(1), costs.drafts.guess_ms if costs else {}, records)
    return Pace(passes, costs is not None, costs.round_ms if costs else ROUND_MS, prospects)
