"""Writes edgeinfer/core/options/types.py from the declared options: python -m tests.tools.option_types"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeinfer.core.options import OptionGroup, decoding, load, options_of, reply, types

_WIDTH = 120
_HEAD = '''\
"""Types of the options that callers give, for type checkers and editors; each key has its option's help. Made from the
declarations by `python -m tests.tools.option_types`; a test holds the two equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from edgeinfer.core.options.decoding import Answer, ReducedCompute, Search, SkipCache, Speculation
from edgeinfer.core.options.load import Cache, CountedPages, KvType, OverflowPolicy, RemoteApi, RemoteLoss, WeightsMode
from edgeinfer.core.options.reply import Sampling, SchemaClass

Prompt: TypeAlias = str | Sequence[int]
JsonSchema: TypeAlias = Mapping[str, Any] | str | type[SchemaClass]
'''
_GROUPS = """SamplingOption: TypeAlias = Sampling | SamplingDict
SpeculationOption: TypeAlias = str | Speculation | SpeculationDict
SearchOption: TypeAlias = str | Search | SearchDict
ComputeOption: TypeAlias = str | ReducedCompute | ReducedComputeDict
CacheOption: TypeAlias = Cache | CacheDict
"""
# Options that stand for a group where they are given by themselves.
_GROUP_TYPES = {"speculation": "SpeculationOption", "search": "SearchOption", "compute": "ComputeOption"}
_SAMPLING = "How tokens are drawn, all of it; options given by themselves take precedence"
_CACHE = "The KV cache: `Cache`, or a dictionary such as {'kv': 'int8'}; options given by themselves take precedence"

_REPLY = (reply.SamplingOptions, decoding.SearchSettings, decoding.ComputeSettings, decoding.ReplyDrafting)
_LOAD = (load.CacheOptions, decoding.LoadDrafting)


def source() -> str:
    """The text of the module."""
    bias = ("logit_bias",)
    parts = [
        _HEAD,
        _class("_Sampling", "TypedDict", "", reply.SamplingOptions, without=bias),
        _class("SamplingDict", "_Sampling", "`Sampling` as a dictionary.", reply.SamplingOptions, only=bias),
        _class("_Search", "TypedDict", "", decoding.SearchSettings),
        _class("SearchDict", "_Search", "`Search` as a dictionary.", decoding.Search, only=("method",)),
        _class("_Compute", "TypedDict", "", decoding.ComputeSettings),
        _class(
            "ReducedComputeDict",
            "_Compute",
            "`ReducedCompute` as a dictionary.",
            decoding.ReducedCompute,
            only=("method",),
        ),
        _class("_DraftLength", "TypedDict", "", decoding.DraftLength),
        _class("_LoadDrafting", "_DraftLength", "", decoding.LoadDrafting, above=(decoding.DraftLength,)),
        _class("_ReplyDrafting", "_DraftLength", "", decoding.ReplyDrafting, above=(decoding.DraftLength,)),
        _class(
            "SpeculationDict",
            "_ReplyDrafting, _LoadDrafting",
            "`Speculation` as a dictionary.",
            decoding.Speculation,
            only=("drafters",),
        ),
        _class("CacheDict", "TypedDict", "`Cache` as a dictionary.", load.Cache),
        _GROUPS,
        _class(
            "RequestDict",
            "_Sampling, _Search, _Compute, _ReplyDrafting",
            "Options of replies that requests of OpenAI's shape give in the same form.",
            reply.ReplyOptions,
            above=_REPLY,
            without=(*bias, "logprobs"),
            extra=_key("sampling", "SamplingOption", _SAMPLING),
        ),
        _class(
            "ReplyDict",
            "RequestDict",
            "All options of replies.",
            reply.ReplyOptions,
            only=(*bias, "logprobs"),
        ),
        _class(
            "LoadDictButContext",
            "CacheDict, _LoadDrafting",
            "Options of loading where the context is given in another way.",
            load.LoadOptions,
            above=_LOAD,
            without=("context", "prefix_cache"),
            extra=_key("cache", "CacheOption", _CACHE),
        ),
        _class("LoadDict", "LoadDictButContext", "All options of loading.", load.LoadOptions, only=("context",)),
    ]
    return "\n\n".join(parts)


def _class(
    name: str,
    bases: str,
    doc: str,
    configuration: type[Any],
    *,
    only: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    above: tuple[type[Any], ...] = (),
    extra: str = "",
) -> str:
    """A class with the options of a configuration, but for those that the configurations above it have."""
    inherited = {field.name for each in above for field in dataclasses.fields(each)}
    names = only or tuple(each for each in options_of(configuration) if each not in inherited | {*without})
    fields = {field.name: field for field in dataclasses.fields(configuration)}
    keys = []
    for each in names:
        declared = options_of(configuration)[each]
        group = None if issubclass(configuration, OptionGroup) else _GROUP_TYPES.get(each)
        keys.append(_key(each, group or declared.given or str(fields[each].type), declared.description))
    head = [f"class {name}({bases}, total=False):", *([f'    """{doc}"""\n'] if doc else [])]
    return "\n".join([*head, *keys, *([extra] if extra else [])]) + "\n"


def _key(name: str, kind: str, text: str) -> str:
    kind = kind if kind.endswith("None") else f"{kind} | None"
    return "\n".join([f"    {name}: {kind}", *_docstring(f"{text[0].upper()}{text[1:]}.")])


def _docstring(text: str) -> Iterator[str]:
    yield from textwrap.wrap(f'"""{text}"""', _WIDTH, initial_indent="    ", subsequent_indent="    ")


if __name__ == "__main__":
    Path(types.__file__).write_text(source(), "utf-8")
