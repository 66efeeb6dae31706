"""The declared options as flags of commands, and the keyword arguments that they become."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.cli.inputs import prepared, read_stdin, read_text, utf8
from edgeinfer.apps.cli.output import progress_bar
from edgeinfer.core.errors import Setting, UsageError, shown
from edgeinfer.core.options import ConfigOption, is_integer, options_of, parse_size
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.reply import ReplyOptions

if TYPE_CHECKING:
    from edgeinfer import Model
    from edgeinfer.apps.cli.parser import Parser


# Options of LoadOptions by subject, in the order of help.
MEMORY = (
    *("memory", "context", "kv", "overflow", "weights", "expert_memory", "counted", "prefill_chunk", "profile"),
    *("prefix_cache", "structured"),
)
CONVERTING = ("bits", "calibration")
DRAFTING = ("speculation", "draft_model", "draft_max", "draft_experts", "remember")
LOADING = ("adapters", *MEMORY, "threads", "exact", "backend", "native", "device", "gpu_layers", *DRAFTING)
REMOTE = (
    *("remote", "remote_api", "remote_model", "remote_digest", "remote_loss"),
    *("remote_draft_price", "remote_kilobyte_price", "rpc", "rpc_public"),
)
# Other users of the machine can see arguments.
_REMOTE_KEY = "EDGEINFER_REMOTE_KEY"
_DECLARED = {**options_of(LoadOptions), **options_of(ReplyOptions)}
_DEFAULT = re.compile(r"\(default: [^)]*\)")
# Options of a reply that commands offer.
GENERATION = tuple(name for name, option in options_of(ReplyOptions).items() if option.flags)


def add_model_option(parser: Parser) -> None:
    """Add -m."""
    text = (
        "catalog name (edgeinfer models --catalog), hub id ORG/NAME or ORG/NAME:TYPE, bundle or checkpoint "
        "directory, or .gguf file (default: the small built-in story model)"
    )
    action = parser.add_argument_group("model").add_argument("-m", "--model", metavar="MODEL", help=text)
    parser.brief(action, "catalog name, Hugging Face id, folder or .gguf file (default: a story model)")


def add_load_options(parser: Parser, *, converts: bool = True, remote: bool = False) -> None:
    """Add -m and the options of LoadOptions: those of conversions if the command converts checkpoints, and of remote
    servers."""
    add_model_option(parser)
    add_options(parser, LoadOptions, (*LOADING, *(CONVERTING if converts else ()), *(REMOTE if remote else ())))


def add_generation_options(
    parser: Parser, limit: str = "until the context is full", usual: Mapping[str, str] | None = None
) -> None:
    """Add the options of ReplyOptions except those that loading has too, such as --speculation. `limit` and `usual`
    say defaults of the command in words."""
    help = {
        "max_tokens": f"maximum number of tokens to generate (default: {limit})",
        "json_schema": "JSON schema that the reply must match: a file, - for stdin, or the schema itself",
        "grammar": "file with a grammar that the reply must match, in Lark's notation or GBNF; - reads stdin",
        "logit_bias": "value to add to a token's logit, such as 42=-5; can be repeated",
        "passage": "file with the text of which extract finds the likeliest span; - reads stdin",
    }
    names = [name for name in GENERATION if name not in LOADING]
    add_options(
        parser,
        ReplyOptions,
        sorted(names, key=lambda name: _group(name) != _group("choices")),
        help=help,
        usual=usual,
    )
    group = next(group for group in parser._action_groups if group.title == _group("choices"))
    text = "UTF-8 file whose lines are the allowed replies; - reads stdin"
    parser.advanced(group.add_argument("--choices", dest="choices_file", metavar="FILE", help=text))
    text = "Python file whose function check(text, ended) says whether the reply may start with a text, or be it"
    parser.advanced(group.add_argument("--checker", dest="checker_file", metavar="FILE", help=text))


def _group(name: str) -> str:
    return _DECLARED[name].group


def add_options(
    parser: Parser,
    configuration: type[Any],
    names: Iterable[str] | None = None,
    *,
    help: Mapping[str, str] | None = None,
    usual: Mapping[str, str] | None = None,
) -> None:
    """Add options of a configuration under their headings, all that have a flag if `names` is None. Absent options are
    None, so that defaults stay with the configuration."""

    def described(name: str, text: str) -> str:
        default = (usual or {}).get(name)
        return text if default is None else _DEFAULT.sub(f"(default: {default})", text)

    declared = options_of(configuration)
    groups = {group.title: group for group in parser._action_groups}
    for name in declared if names is None else names:
        option = declared[name]
        if not option.flags:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        text = described(name, (help or {}).get(name, option.help)).replace("%", "%%")
        action = groups[option.group].add_argument(*option.flags, dest=name, help=text, **_action(option))
        if not option.basic:
            parser.advanced(action)
        if option.brief:
            parser.brief(action, described(name, option.brief))


def _action(option: ConfigOption) -> dict[str, Any]:
    """The keyword arguments of argparse for an option."""
    if option.type is bool:
        if option.optional:
            return {"action": argparse.BooleanOptionalAction}
        return {"action": "store_const", "const": not option.default}
    if option.choices:
        return {"choices": option.choices}
    valued = {"metavar": option.metavar}
    if option.size:
        return valued | {"type": parse_size}
    if typing.get_origin(option.type) is tuple:
        kind = typing.get_args(option.type)[0]
        return valued | ({"action": "append"} if kind is str else {"type": _list_of(kind)})
    if typing.get_origin(option.type) is Mapping:
        of_texts = typing.get_args(option.type)[0] is str
        return valued | {"action": "append", "type": _named if of_texts else _bias}
    return valued | ({"type": option.type} if option.type in (int, float) else {})


def _list_of(kind: type[Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of numbers") from None

    return parse


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=PATH")
    return name, value


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ID=X, such as 42=-5") from None


def given_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options that the user gave, of these names."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def load_options(args: argparse.Namespace, *, converts: bool = True) -> dict[str, Any]:
    """The keyword arguments of edgeinfer.load that the user gave, checked before anything is loaded."""
    options = given_options(args, (*LOADING, *(CONVERTING if converts else ()), *REMOTE))
    if "adapters" in options:
        options["adapters"] = dict(options["adapters"])
    if "remote" in options and (key := os.environ.get(_REMOTE_KEY)):
        options["remote_key"] = key
    LoadOptions.of(**options)
    return options


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The generation options that the user gave, checked before anything is loaded."""
    options = given_options(args, GENERATION)
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    if "json_schema" in options:
        options["json_schema"] = _schema(options["json_schema"])
    for name in ("grammar", "passage"):
        if name in options:
            options[name] = _contents(options[name])
    if args.choices_file is not None:
        lines = [line for line in _contents(args.choices_file).splitlines() if line.strip()]
        options["choices"] = [*options.get("choices", ()), *lines]
    if args.checker_file is not None:
        options["checker"] = _function(Path(args.checker_file), "check", "returns True or False")
    for name, flag in (("stop", "--stop"), ("choices", "--choice"), ("regex", "--regex")):
        if name in options:
            given = options[name]
            options[name] = utf8(given, flag) if isinstance(given, str) else tuple(utf8(text, flag) for text in given)
    ReplyOptions(**options)
    return options


def reads_stdin(args: argparse.Namespace) -> bool:
    """Whether an option reads stdin."""
    return "-" in (args.json_schema, args.grammar, args.choices_file, args.passage)


def _schema(text: str) -> str:
    """A schema given as text or in a file."""
    return utf8(text, "--json-schema") if text.lstrip().startswith("{") else _contents(text)


def _function(file: Path, name: str, does: str) -> Callable[[str, bool], Any]:
    """A function of the user's Python file, which is executed."""
    if not file.is_file():
        raise UsageError(f"There is no file {file}.", f"Give a Python file with a function {name}(text, ended).")
    found: Callable[[str, bool], Any] | None = runpy.run_path(str(file)).get(name)
    if not callable(found):
        raise UsageError(f"{file} has no function {name}.", f"Define {name}(text, ended), which {does}.")
    return found


def _contents(file: str) -> str:
    return read_stdin() if file == "-" else read_text(Path(file))


def as_flag(setting: Setting) -> str:
    """A setting in a message, in the form of the command line."""
    option = _DECLARED.get(setting.name)
    if option is None or not option.flags:
        return str(setting)
    flag, value = option.flags[-1], setting.value
    if value is ...:
        return flag
    if option.type is bool:
        return f"no {flag}" if value == option.default else flag
    if option.size and is_integer(value):
        size = int(str(value))
        return f"{flag} {size // 10**6}MB" if size and size % 10**6 == 0 else f"{flag} {size}"
    return f"{flag} {shlex.quote(value) if isinstance(value, str) and len(value) < 80 else shown(value)}"


def load_model(model: str | None, options: Mapping[str, Any]) -> Model:
    """Load a model, with a progress bar if it must be fetched or converted first. Errors as `edgeinfer.load`."""
    model, options = prepared(model, options)
    with progress_bar() as progress:
        shown: dict[str, Any] = {} if progress is None else {"progress": progress}
        return edgeinfer.load(model, **options, **shown)
