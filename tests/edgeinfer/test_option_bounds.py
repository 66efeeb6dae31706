"""Options at their extremes and one step from sound ones: a reply or a UsageError, and nothing else."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench.curve import CurveConfig
from edgeinfer.apps.bench.quality import QualityOptions
from edgeinfer.apps.bench.spec import SpecOptions
from edgeinfer.apps.bench.speed import SpeedConfig, SpeedTest
from edgeinfer.apps.desktop.settings import AppSettings
from edgeinfer.apps.server.security import Security
from edgeinfer.bundle.geometry import KVLayer, StateLayer
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.packing import QuantizedShape
from edgeinfer.bundle.parts import ConvSpec, HeadsSpec
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import Range, options_of, parse_size
from edgeinfer.core.options.decoding import ReducedCompute, Search, Speculation
from edgeinfer.core.options.load import Cache, LoadOptions
from edgeinfer.core.options.reply import ReplyOptions, Sampling
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.settings import TunedSettings
from tests.bounds import bounds, facts
from tests.recorded import check_recorded
from tests.speculation import known_costs

EXTREMES: tuple[Any, ...] = (
    1e300, -1e300, 1e-300, -1e-300, 5e-324, 10**30, -(10**30), 10**400, 10**5000, 2**63, 2**31, math.nan, math.inf,
    -math.inf, -0.0, 0, 1, -1, True, False, "1", [1], {}, b"1",
)  # fmt: skip


def ranges(configuration: type[Any]) -> dict[str, Range]:
    """The ranges of the options that take a number."""
    return {name: option.range for name, option in options_of(configuration).items() if option.range is not None}


LOAD_RANGES, RANGES = ranges(LoadOptions), ranges(ReplyOptions)
# What an option is of use with.
WITH: dict[str, dict[str, Any]] = {
    "samples": {"search": "vote", "temperature": 1.0},
    "beams": {"search": "beam"},
    "beam_groups": {"search": "beam"},
    "diversity": {"search": "beam", "beam_groups": 2},
    "length_penalty": {"search": "beam"},
    "candidates": {"search": "momentum"},
    "resistance": {"search": "momentum"},
    "resistance_weight": {"search": "momentum"},
    "draft_max": {"speculation": "ngram"},
    "draft_width": {"speculation": "ngram"},
    "min_p": {"temperature": 1.0},
    "top_p": {"temperature": 1.0},
    "top_k": {"temperature": 1.0},
    "seed": {"temperature": 1.0},
    **{name: {"compute": "exit"} for name in ("exit_layer", "exit_confidence", "quality_floor")},
    "compute_speedup": {"compute": "unified"},
}
# Fields of requests whose names differ from the options'.
FIELDS = ("max_completion_tokens", "repeat_penalty", "n", "top_logprobs", "seed")


@pytest.fixture(scope="module")
def model(small_bundle: Path) -> Iterator[edgeinfer.Model]:
    with known_costs(), edgeinfer.load(small_bundle, threads=1, context=200, remember=False) as loaded:
        yield loaded


def numeric(kind: type[Any]) -> set[str]:
    """The fields that take a number."""
    hints = typing.get_type_hints(kind)
    return {f.name for f in dataclasses.fields(kind) if {int, float} & {hints[f.name], *typing.get_args(hints[f.name])}}


def test_every_number_has_a_range() -> None:
    # Of loading one more, which may be a word too.
    assert numeric(LoadOptions) == {*LOAD_RANGES, "gpu_layers"}
    # Tuples and a mapping have ranges for their numbers.
    assert numeric(ReplyOptions) == {*RANGES, "resistance", "logit_bias", "stop_token_ids"}


def test_numbers_of_loading() -> None:
    taken = 0
    for name in (*LOAD_RANGES, "gpu_layers"):
        for value in EXTREMES:
            try:
                LoadOptions.of(**{name: value} | ({"weights": "experts"} if name == "expert_memory" else {}))
                taken += 1
            except UsageError as error:
                assert error.hint and len(str(error)) < 400
    assert taken > len(LOAD_RANGES)
    for size in (10**400, 10**5000, -(10**5000), "9" * 400 + "TB", f"{2**63}", "1e9", math.inf, math.nan):
        with pytest.raises(UsageError):
            parse_size(size)  # type: ignore[arg-type]


def reply(model: edgeinfer.Model, options: dict[str, Any]) -> bool:
    """Whether there was one."""
    try:
        model.generate("One", **{"max_tokens": 3} | options)
    except UsageError as error:
        assert error.hint and len(str(error)) < 500
        return False
    return True


@pytest.mark.slow
def test_numbers_of_a_reply(model: edgeinfer.Model) -> None:
    for name, allowed in RANGES.items():
        ends = [allowed.most, allowed.least if not allowed.above else 1e-300]
        ends = [int(end) if allowed.whole else end for end in ends]
        for value in (*EXTREMES, *ends):
            answered = reply(model, WITH.get(name, {}) | {name: value})
            as_openai = name == "logprobs" and isinstance(value, bool)
            assert not answered or as_openai or allowed.holds(value), (name, value)
        for end in ends:
            taken: dict[str, Any] = {name: end} | ({"beams": 16} if name == "beam_groups" else {})
            ReplyOptions(**taken)


def test_numbers_inside_of_lists(model: edgeinfer.Model) -> None:
    for value in EXTREMES:
        known = isinstance(value, int | float) and not isinstance(value, bool)
        biased = reply(model, {"logit_bias": {5: value, 6: 1.0}, "repetition_penalty": 0.01})
        assert biased == (known and (abs(value) <= 1e6 or value in (math.inf, -math.inf))), value
        reply(model, {"logit_bias": {value if not isinstance(value, list | dict) else (): 1.0}})
        reply(model, {"stop_token_ids": (value,)})
        resisted = reply(model, {"search": "momentum", "resistance": (0.0, value)})
        assert resisted == (known and 0 <= value <= 1e6), value


def test_numbers_of_a_request(model: edgeinfer.Model) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for name in (*FIELDS, *(set(RANGES) - {"logprobs", "max_tokens"}), "logprobs", "max_tokens"):
        for value in EXTREMES:
            asked: dict[str, Any] = {"max_tokens": 2, "messages": messages} | WITH.get(name, {}) | {name: value}
            if name == "max_completion_tokens":
                del asked["max_tokens"]
            if name == "top_logprobs":
                asked["logprobs"] = True
            try:
                model.create_chat_completion(**asked)
            except UsageError as error:
                assert len(str(error)) < 500


@pytest.mark.slow
def test_together_they_stay_numbers(model: edgeinfer.Model) -> None:
    """The ends of all ranges at once, where they can be."""
    for least in (False, True):
        ends = {
            name: (RANGES[name].least if least else RANGES[name].most)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty", "min_p", "temperature")
        }
        for bias in (1e6, -1e6, math.inf, -math.inf):
            for temperature in (ends["temperature"], 5e-324, 1.0):
                options = ends | {"temperature": temperature, "logit_bias": {5: bias, 6: bias}, "max_tokens": 12}
                assert reply(model, options | {"logprobs": 20, "top_p": 5e-324, "seed": 2**64 - 1})


SOUND: tuple[Any, ...] = (
    *(
        LoadOptions(),
        LoadOptions(memory=600_000_000, context=64, kv="int8", overflow="cluster"),
        Cache(prefix_cache="5MB"),
    ),
    *(ReplyOptions(), ReplyOptions(temperature=0.7, top_p=0.9, max_tokens=8, seed=1), Sampling(temperature=1)),
    *(ReplyOptions(search="beam"), Speculation(), Search("beam"), ReducedCompute("unified")),
    *(PassCosts(((1, 2.0), (4, 3.0)), 2), TunedSettings(threads=2, affinity="1;2", prefill_chunk=64), AppSettings()),
    *(
        SpeedTest(8, 4),
        SpeedConfig(),
        CurveConfig(),
        SpecOptions(),
        QualityOptions(),
        *(Security(), KVLayer(2, 16, 32), KVLayer(2, 0, 16), KVLayer(0, 0, 0), StateLayer(4, 2, 8, 16, 96, 4)),
        *(ConvSpec(4), HeadsSpec(2, 16), QuantizedShape(6, 70, 4, 32, True)),
    ),
)


def parts(value: Any) -> Iterator[Any]:
    """The dataclasses that a description is made of, of each kind the first."""
    seen: set[type] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, tuple | list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
        elif dataclasses.is_dataclass(each):
            if type(each) not in seen:
                seen.add(type(each))
                yield each
            waiting += [getattr(each, field.name) for field in dataclasses.fields(each)]


def test_options_one_step_away_are_refused_as_they_were() -> None:
    found = {f"{n} {type(each).__name__}": [bounds(each), facts(each)] for n, each in enumerate(SOUND)}
    check_recorded("bounds-config", found)


def test_manifests_one_step_away_are_refused_as_they_were(small_bundle: Path) -> None:
    found = {}
    for part in parts(open_bundle(small_bundle).manifest):
        found[type(part).__name__] = [bounds(part), facts(part)]
    check_recorded("bounds-manifest", found)
