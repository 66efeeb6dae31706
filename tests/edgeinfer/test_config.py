"""Options of loading and generating: what is accepted, and that all else is refused with a usable message."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import UsageError
from edgeinfer.options import format_size, parse_size
from edgeinfer.options.load import LoadConfig
from edgeinfer.options.reply import GenerationConfig
from tests.tables import each_row


@each_row(
    ("text", "size"),
    [
        ("600MB", 600_000_000),
        ("1.5GiB", 1_610_612_736),
        ("400000000", 400_000_000),
        ("  64 kb ", 64_000),
        ("2g", 2_000_000_000),
        ("1KiB", 1024),
        ("10B", 10),
        (12345, 12345),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@each_row("text", ["", "MB", "0", "-5MB", "5XB", "1e9", "5 M B", "0.0001KB", "nan", -1, 0, True, 1.5, None])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert repr(text) in caught.value.message
    assert caught.value.hint


@each_row(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (412_300_000, "412.3 MB"), (2 * 10**9, "2.0 GB")]
)
def test_formatted_sizes(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, 10**12))
def test_a_formatted_size_reads_back_nearly(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= 0.05 * size + 1


@each_row(
    "option",
    [
        {"context": 1},
        {"context": -5},
        {"memory": 0},
        {"threads": 0},
        {"threads": 5000},
        {"prefill_chunk": 0},
    ],
)
def test_load_options_out_of_range(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(UsageError, match=name) as caught:
        LoadConfig(**option)
    assert caught.value.hint


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_k": -1},
    {"top_p": -0.1},
    {"top_p": 1.1},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0.0},
    {"frequency_penalty": float("nan")},
    {"presence_penalty": float("inf")},
    {"logit_bias": {3: float("nan")}},
    {"stop": ("",)},
    {"stop": ""},
    {"seed": -1},
    {"seed": 2**64},
    {"speculation": "psychic"},
]
WRONG_TYPE: list[dict[str, Any]] = [
    {"max_tokens": "5"},
    {"max_tokens": 2.5},
    {"temperature": "hot"},
    {"top_k": 1.5},
    {"seed": "one"},
    {"seed": 1.5},
    {"stop": 5},
    {"stop": (5,)},
    {"stop_token_ids": 5},
    {"stop_token_ids": ("a",)},
    {"logit_bias": [1, 2]},
    {"logit_bias": {"a": 1.0}},
    {"logit_bias": {1: "b"}},
    {"ignore_eos": "no"},
]


@each_row("option", OUT_OF_RANGE)
def test_generation_options_out_of_range(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(UsageError, match=name) as caught:
        GenerationConfig(**option)
    assert caught.value.hint


@each_row("option", WRONG_TYPE)
def test_generation_options_of_the_wrong_type(option: dict[str, Any]) -> None:
    """They come from HTTP requests as they are, so they must not end as a TypeError somewhere inside."""
    (name,) = option
    with pytest.raises(UsageError, match=name):
        GenerationConfig(**option)


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'heat'") as caught:
        GenerationConfig().replace(heat=1)
    assert "temperature" in caught.value.hint


def test_replacing_validates_and_leaves_the_original() -> None:
    config = GenerationConfig(temperature=0.5)
    assert config.replace(top_k=3) == GenerationConfig(temperature=0.5, top_k=3)
    with pytest.raises(UsageError):
        config.replace(top_p=2)
    assert config == GenerationConfig(temperature=0.5)


def test_configurations_are_frozen() -> None:
    for config in (GenerationConfig(), LoadConfig()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, dataclasses.fields(config)[0].name, 1)


def test_one_stop_string_needs_no_list() -> None:
    assert GenerationConfig(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert GenerationConfig(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@each_row(("options", "greedy"), [({}, True), ({"temperature": 1.0}, False), ({"temperature": 1.0, "top_k": 1}, True)])
def test_greedy(options: dict[str, Any], greedy: bool) -> None:
    assert GenerationConfig(**options).greedy is greedy


def test_log_probabilities_as_openai_asks_for_them() -> None:
    assert [GenerationConfig.of(logprobs=asked).logprobs for asked in (True, False, None, 3)] == [0, None, None, 3]


def test_nothing_is_made_of_what_is_too_large() -> None:
    largest: dict[str, Any] = {
        "stop": ["a" * 1000] * 16,
        "stop_token_ids": list(range(1024)),
        "logit_bias": dict.fromkeys(range(4096), 1.0),
        "choices": ["a" * 40] * 100_000,
    }
    larger: dict[str, list[Any]] = {
        "stop": [["a" * 1001], ["a"] * 17, ["a" * 950_000] * 4],
        "stop_token_ids": [list(range(1025))],
        "logit_bias": [dict.fromkeys(range(4097), 1.0)],
        "choices": [["a"] * 100_001, ["a" * 4_000_001]],
    }
    for name, value in largest.items():
        GenerationConfig(**{name: value})
        for too_large in larger[name]:
            with pytest.raises(UsageError, match=name) as caught:
                GenerationConfig(**{name: too_large})
            assert len(str(caught.value)) < 500


def test_errors_do_not_quote_all_of_a_value() -> None:
    with pytest.raises(UsageError) as caught:
        GenerationConfig(temperature="a" * 1_000_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500
