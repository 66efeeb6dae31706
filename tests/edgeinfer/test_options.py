"""Options have one name everywhere: in signatures, dictionaries, objects, requests and flags; mistakes get a hint."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.chat import Chat
from edgeinfer.errors import PromptError, UsageError
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields, sampling
from edgeinfer.options import options_of, parse_size, types
from edgeinfer.options.load import LOAD_GROUPS, Cache, LoadConfig
from edgeinfer.options.reply import REPLY_GROUPS, GenerationConfig
from tests.tools import option_types

# Flags with a name of their own: they turn something off, or give one of several.
FLAGS = {"exact": "--no-exact", "remember": "--no-remember", "choices": "--choice"}
FLAGS |= {"parse_special": "--parse-special", "adapters": "--lora", "method_options": "--method-option"}


def test_types_for_editors_are_made_from_the_declarations() -> None:
    made = "Run python -m tests.tools.option_types."
    assert Path(types.__file__).read_text("utf-8") == option_types.source(), made
    replies, loading = types.GenerationOptions.__annotations__, types.LoadOptions.__annotations__
    assert replies.keys() == options_of(GenerationConfig).keys() | REPLY_GROUPS.keys()
    assert loading.keys() == options_of(LoadConfig).keys() | LOAD_GROUPS.keys()
    for group in (*REPLY_GROUPS.values(), *LOAD_GROUPS.values(), GenerationConfig, LoadConfig):
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
        assert typing.get_args(typing.get_type_hints(call)["options"]) == (types.GenerationOptions,), call
    for call in (edgeinfer.load, edgeinfer.plan, edgeinfer.aload):
        assert typing.get_args(typing.get_type_hints(call)["options"]) == (types.LoadOptions,), call


def test_flags_and_requests_have_the_options_name() -> None:
    for name, option in {**options_of(LoadConfig), **options_of(GenerationConfig)}.items():
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
        "steering": "story:1.5",
    }
    values |= {"sampling": {"temperature": 0.5, "logit_bias": {"5": 1.0}}}
    elsewhere = {"max_tokens", "logprobs", "checker"}  # what OpenAI's endpoints name in different ways
    for name in options_of(GenerationConfig).keys() - elsewhere:
        option = options_of(GenerationConfig)[name]
        fields = Fields({name: values.get(name, 3 if option.default is None else option.default)})
        assert sampling(fields).keys() == {name}
        fields.end()
    asked = {"sampling": values["sampling"], "search": {"method": "beam", "beams": 6}, "temperature": 0.9, "beams": 8}
    assert sampling(Fields(asked)) == {"temperature": 0.9, "logit_bias": {5: 1.0}, "search": "beam", "beams": 8}
    with pytest.raises(RequestError, match="bems") as caught:
        sampling(Fields({"search": {"bems": 6}}))
    assert caught.value.param == "search" and "Did you mean 'beams'?" in caught.value.hint


def test_groups_are_their_options_and_what_is_given_by_itself_goes_first() -> None:
    of = GenerationConfig.of
    assert of(search={"method": "beam", "beams": 6}) == of(search="beam", beams=6)
    assert of(search=edgeinfer.Search("beam", beams=6), beams=8).beams == 8
    assert of(compute=edgeinfer.ReducedCompute("exit", exit_layer=2)) == of(compute="exit", exit_layer=2)
    assert of(sampling=edgeinfer.Sampling(temperature=0.5, seed=1), seed=2) == of(temperature=0.5, seed=2)
    assert of(speculation={"drafters": "copy", "draft_max": 4}) == of(speculation="copy", draft_max=4)
    cache = Cache(kv="int8", prefix_cache="50MB")
    assert LoadConfig.of(cache=cache) == LoadConfig.of(kv="int8", prefix_cache=parse_size("50MB"))
    assert LoadConfig.of(speculation=edgeinfer.Speculation(draft_max=3, remember=False)).draft_max == 3


WRONG: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: LoadConfig.of(memroy="1GB"), "'memroy'", "Did you mean 'memory'?"),
    (lambda: LoadConfig.of(temperature=1), "'temperature'", "generate()"),
    (lambda: LoadConfig.of(cache={"kw": "int8"}), "Unknown option of Cache 'kw'", "Known options: kv,"),
    (lambda: LoadConfig.of(cache="int8"), "'int8' cannot be used as Cache", "a mapping"),
    (lambda: LoadConfig.of(speculation={"verification": "typical"}), "'verification'", "generate()"),
    (lambda: LoadConfig.of(device="cudaa"), "'cudaa'", "Did you mean 'cuda'?"),
    (lambda: GenerationConfig.of(temprature=1), "'temprature'", "Did you mean 'temperature'?"),
    (lambda: GenerationConfig.of(threads=1), "'threads'", "edgeinfer.load()"),
    (lambda: GenerationConfig.of(speculation={"remember": False}), "'remember'", "edgeinfer.load()"),
    (lambda: GenerationConfig.of(speculation="copi"), "'copi'", "Did you mean 'copy'?"),
    (lambda: GenerationConfig.of(search="bean"), "'bean'", "Did you mean 'beam'?"),
    (lambda: edgeinfer.Search("beam", beams=99), "beams=99", "from 1 to 16"),
    (lambda: edgeinfer.Search("extract"), "passage", "Give both"),
    (lambda: edgeinfer.ReducedCompute("unified", skip_cache="below"), "skip_cache", "Leave"),
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
    ]
    for prompt, match in wrong:
        with pytest.raises(PromptError, match=match) as caught:
            model.generate(prompt)
        assert caught.value.hint
    with pytest.raises(PromptError, match="not a string"):
        model.chat().send(["Hi"])  # type: ignore[arg-type]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert model.chat(history=said).messages == said and model.chat(history=said).system == "Be brief."
    for history in (["Hi"], [{"role": "tool", "content": "x"}], [{"role": "user"}], said[1:] + said[:1]):
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
