"""Errors name options as Python does, unless a front end says them in its own words."""

from __future__ import annotations

import pytest

import edgeinfer
from edgeinfer.apps.cli.options import as_flag
from edgeinfer.errors import Setting, UsageError, joined


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
