"""Options: declared once, with one name everywhere; what is accepted, and refusals with a usable message."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgeinfer
from edgeinfer.apps.cli.options import as_flag
from edgeinfer.chat import Chat
from edgeinfer.core.errors import PromptError, Setting, UsageError, joined
from edgeinfer.core.options import format_size, options_of, parse_size, types
from edgeinfer.core.options.load import LOAD_GROUPS, Cache, LoadOptions
from edgeinfer.core.options.reply import REPLY_GROUPS, ReplyOptions
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields, sampling
from tests.tables import each_row
from tests.tools import option_types

# Flags with a name of their own: they turn something off, or give one of several.
FLAGS = {"exact": "--no-exact", "remember": "--no-remember", "calibration": "--no-calibration", "choices": "--choice"}
FLAGS |= {"parse_special": "--parse-special", "adapters": "--lora", "dry_sequence_breakers": "--dry-sequence-breaker"}


def test_types_for_editors_are_made_from_the_declarations() -> None:
    made = "Run python -m tests.tools.option_types."
    assert Path(types.__file__).read_text("utf-8") == option_types.source(), made
    replies, loading = types.ReplyDict.__annotations__, types.LoadDict.__annotations__
    assert replies.keys() == options_of(ReplyOptions).keys() | REPLY_GROUPS.keys()
    assert loading.keys() == options_of(LoadOptions).keys() | LOAD_GROUPS.keys()
    for group in (*REPLY_GROUPS.values(), *LOAD_GROUPS.values(), ReplyOptions, LoadOptions):
        for name, option in options_of(group).items():
            assert f"    {name}: {option.description}." in (group.__doc__ or "")


def test_signatures_take_all_options() -> None:
    model, chat = edgeinfer.Model, Chat
    replies: list[Callable[..., Any]] = [
        model.generate,
        model.stream,
        model.agenerate,
        model.astream,
        model.stream_chat,
    ]
    replies += [chat.send, chat.stream, chat.asend, chat.astream, model.generate_batch, model.chat_batch]
    for call in replies:
        assert typing.get_args(typing.get_type_hints(call)["options"]) == (types.ReplyDict,), call
    for call in (edgeinfer.load, edgeinfer.plan, edgeinfer.aload):
        assert typing.get_args(typing.get_type_hints(call)["options"]) == (types.LoadDict,), call


def test_flags_and_requests_have_the_options_name() -> None:
    for name, option in {**options_of(LoadOptions), **options_of(ReplyOptions)}.items():
        long = [flag for flag in option.flags if flag.startswith("--")]
        assert long in ([], [FLAGS.get(name, "--" + name.replace("_", "-"))]), name
    values: dict[str, Any] = {"stop": "a", "choices": ["a"], "stop_token_ids": [3], "regex": "a", "grammar": "a"}
    values |= {
        "json_schema": {},
        "logit_bias": {"5": 1.0},
        "resistance": [1.0],
        "seed": 3,
        "passage": "Hm",
        "parse_special": True,
        "adapter": "terse",
        "thinking_message": "So.",
        "steering": "story:1.5",
    }
    values |= {"sampling": {"temperature": 0.5, "logit_bias": {"5": 1.0}}}
    elsewhere = {"max_tokens", "logprobs", "checker"}  # what OpenAI's endpoints name in different ways
    for name in options_of(ReplyOptions).keys() - elsewhere:
        option = options_of(ReplyOptions)[name]
        fields = Fields({name: values.get(name, 3 if option.default is None else option.default)})
        assert sampling(fields).keys() == {name}
        fields.end()
    asked = {"sampling": values["sampling"], "search": {"method": "beam", "beams": 6}, "temperature": 0.9, "beams": 8}
    assert sampling(Fields(asked)) == {"temperature": 0.9, "logit_bias": {5: 1.0}, "search": "beam", "beams": 8}
    with pytest.raises(RequestError, match="bems") as caught:
        sampling(Fields({"search": {"bems": 6}}))
    assert caught.value.param == "search" and "Did you mean 'beams'?" in caught.value.hint


def test_groups_are_their_options_and_what_is_given_by_itself_goes_first() -> None:
    of = ReplyOptions.of
    assert of(search={"method": "beam", "beams": 6}) == of(search="beam", beams=6)
    assert of(search=edgeinfer.Search("beam", beams=6), beams=8).beams == 8
    assert of(compute=edgeinfer.ReducedCompute("exit", exit_layer=2)) == of(compute="exit", exit_layer=2)
    assert of(sampling=edgeinfer.Sampling(temperature=0.5, seed=1), seed=2) == of(temperature=0.5, seed=2)
    assert of(speculation={"drafters": "copy", "draft_max": 4}) == of(speculation="copy", draft_max=4)
    cache = Cache(kv="int8", prefix_cache="50MB")
    assert LoadOptions.of(cache=cache) == LoadOptions.of(kv="int8", prefix_cache=parse_size("50MB"))
    assert LoadOptions.of(speculation=edgeinfer.Speculation(draft_max=3, remember=False)).draft_max == 3


WRONG: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: LoadOptions.of(memroy="1GB"), "'memroy'", "Did you mean 'memory'?"),
    (lambda: LoadOptions.of(temperature=1), "'temperature'", "generate()"),
    (lambda: LoadOptions.of(cache={"kw": "int8"}), "Unknown option of Cache 'kw'", "Known options: kv,"),
    (lambda: LoadOptions.of(cache="int8"), "'int8' cannot be used as Cache", "a mapping"),
    (lambda: LoadOptions.of(speculation={"verification": "rejection"}), "'verification'", "generate()"),
    (lambda: LoadOptions.of(device="cudaa"), "'cudaa'", "Did you mean 'cuda'?"),
    (lambda: ReplyOptions.of(temprature=1), "'temprature'", "Did you mean 'temperature'?"),
    (lambda: ReplyOptions.of(threads=1), "'threads'", "edgeinfer.load()"),
    (lambda: ReplyOptions.of(speculation={"remember": False}), "'remember'", "edgeinfer.load()"),
    (lambda: ReplyOptions.of(speculation="copi"), "'copi'", "Did you mean 'copy'?"),
    (lambda: ReplyOptions.of(search="bean"), "'bean'", "Did you mean 'beam'?"),
    (lambda: edgeinfer.Search("beam", beams=99), "beams=99", "from 1 to 16"),
    (lambda: edgeinfer.Search("extract"), "passage", "Give both"),
    (lambda: edgeinfer.ReducedCompute("unified", skip_cache="below"), "skip_cache", "Leave"),
    (lambda: ReplyOptions(json_schema={}, regex="a"), "json_schema and regex cannot be combined", ""),
    (lambda: ReplyOptions(choices=("a",), json_object=True), "choices and json_object", ""),
    (lambda: edgeinfer.Sampling(logit_bias={"a": 1}), "logit_bias", "token ids"),  # type: ignore[dict-item]
]


def test_mistakes_are_named_with_what_to_do() -> None:
    for make, message, hint in WRONG:
        with pytest.raises(UsageError) as caught:
            make()
        assert message in caught.value.message and hint in caught.value.hint, caught.value


def test_what_is_no_prompt_is_refused_with_a_hint(model: edgeinfer.Model) -> None:
    wrong: list[tuple[Any, str]] = [
        (None, "neither a string nor token ids"),
        ([{"role": "user", "content": "Hi"}], "list of messages"),
        (["Hi"], "neither"),
        (5, "neither"),
        ([1.5], "neither"),
        ([], "empty"),
        ("", "empty"),
    ]
    for prompt, match in wrong:
        with pytest.raises(PromptError, match=match) as caught:
            model.generate(prompt)
        assert caught.value.hint
    with pytest.raises(PromptError, match="not a string"):
        model.chat().send(["Hi"])  # type: ignore[arg-type]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert model.chat(history=said).messages == said and model.chat(history=said).system == "Be brief."
    for history in (["Hi"], [{"role": "robot", "content": "x"}], [{"role": "user"}], said[1:] + said[:1]):
        with pytest.raises(UsageError, match=r"history\["):
            model.chat(history=history)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="two system messages"):
        model.chat("Be long.", history=said)


def test_what_a_reply_says_as_json(model: edgeinfer.Model) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    assert model.generate("Count.", json_schema=schema, max_tokens=60).parsed["n"] in (1, 2)
    with pytest.raises(UsageError, match=r"ended \(length\)"):
        _ = model.generate("Count.", json_schema=schema, max_tokens=2).parsed
    with pytest.raises(UsageError, match="not JSON") as caught:
        _ = model.generate("Count.", choices=("one",)).parsed
    assert "json_schema" in caught.value.hint


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


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"temperature": float("nan")},
    {"presence_penalty": float("inf")},
    {"logit_bias": {3: float("nan")}},
    {"stop": ("",)},
    {"stop": ""},
    {"seed": 2**64},
    {"speculation": "psychic"},
    {"speculation": "copy,"},
    {"speculation": "auto,copy"},
]
WRONG_TYPE: list[dict[str, Any]] = [
    {"max_tokens": "5"},
    {"seed": 1.5},
    {"stop": 5},
    {"stop": (5,)},
    {"stop_token_ids": 5},
    {"stop_token_ids": ("a",)},
    {"logit_bias": [1, 2]},
    {"logit_bias": {"a": 1.0}},
    {"logit_bias": {1: "b"}},
    {"ignore_eos": "no"},
    {"json_schema": 5},
    {"json_object": "yes"},
    {"regex": 5},
    {"grammar": b"a"},
]


@each_row("option", OUT_OF_RANGE)
def test_generation_options_out_of_range(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(UsageError, match=name) as caught:
        ReplyOptions(**option)
    assert caught.value.hint


@each_row("option", WRONG_TYPE)
def test_generation_options_of_the_wrong_type(option: dict[str, Any]) -> None:
    """They come from HTTP requests as they are, so they must not end as a TypeError somewhere inside."""
    (name,) = option
    with pytest.raises(UsageError, match=name):
        ReplyOptions(**option)


def test_replacing_validates_and_leaves_the_original() -> None:
    config = ReplyOptions(temperature=0.5)
    assert config.replace(top_k=3) == ReplyOptions(temperature=0.5, top_k=3)
    with pytest.raises(UsageError):
        config.replace(top_p=2)
    assert config == ReplyOptions(temperature=0.5)


def test_one_stop_string_needs_no_list() -> None:
    assert ReplyOptions(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert ReplyOptions(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@each_row(("options", "greedy"), [({}, True), ({"temperature": 1.0}, False), ({"temperature": 1.0, "top_k": 1}, True)])
def test_greedy(options: dict[str, Any], greedy: bool) -> None:
    assert ReplyOptions(**options).greedy is greedy


def test_log_probabilities_as_openai_asks_for_them() -> None:
    assert [ReplyOptions.of(logprobs=asked).logprobs for asked in (True, False, None, 3)] == [0, None, None, 3]


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
        ReplyOptions(**{name: value})
        for too_large in larger[name]:
            with pytest.raises(UsageError, match=name) as caught:
                ReplyOptions(**{name: too_large})
            assert len(str(caught.value)) < 500


def test_errors_do_not_quote_all_of_a_value() -> None:
    with pytest.raises(UsageError) as caught:
        ReplyOptions(temperature="a" * 1_000_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500


def test_an_option_is_named_in_the_words_of_the_place() -> None:
    for setting, python, flag in (
        (Setting("context"), "context", "--context"),
        (Setting("context", 64), "context=64", "--context 64"),
        (Setting("overflow", "window"), "overflow='window'", "--overflow window"),
        (Setting("memory", 400 * 10**6), "memory=400000000", "--memory 400MB"),
        (Setting("exact", False), "exact=False", "--no-exact"),
        (Setting("ignore_eos", True), "ignore_eos=True", "--ignore-eos"),
        (Setting("regex", "a b"), "regex='a b'", "--regex 'a b'"),
        (Setting("logprobs", 3), "logprobs=3", "logprobs=3"),
        (Setting("draft_max", None), "draft_max=None", "--draft-max None"),
    ):
        assert (str(setting), as_flag(setting)) == (python, flag)
    assert len(as_flag(Setting("regex", "x" * 9999))) < 100


def test_errors_name_options_in_the_words_of_the_place() -> None:
    error = UsageError(
        "Too long.", "Give a larger " + Setting("context") + ", or " + Setting("overflow", "window") + "."
    )
    assert str(error) == "Too long. Give a larger context, or overflow='window'."
    assert error.hint == "Give a larger context, or overflow='window'."
    assert error.text(as_flag) == "Too long. Give a larger --context, or --overflow window."
    assert str(joined(map(Setting, ("a", "b", "c")), "and") + "!") == "a and b and c!"
    # What users wrote stays as it is, whatever it looks like.
    assert UsageError("{context} --context", "context=1").text(as_flag) == "{context} --context context=1"
    with pytest.raises(UsageError, match="memory=400 means 400 bytes"):
        edgeinfer.load(memory=400)
