"""Calls of BFCL's functions: which compile, whether true calls are read back, how many forced calls are valid.

    python -m tests.tools.tool_calls DATA/bfcl --max-tokens 256

Functions of the Berkeley Function Calling Leaderboard are offered as tools. Its true calls are written in every format
and read back in pieces. Then the model is made to call, and `jsonschema` judges the arguments; replies that
`max_tokens` cuts short count apart. A small model's calls are valid, not wise: nothing here says it chose well.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.render import Table, print_table
from edgeinfer.errors import EdgeInferError, GrammarError, UsageError
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.replies import FORMATS, ArgumentsPiece, CallPiece, CallReader, ToolFormat
from edgeinfer.openai.tools import ToolChoice, ToolFunction, calls_grammar, read_functions
from edgeinfer.results import Chunk
from tests.tools.figures import percentile, script_json
from tests.tools.structured import add_reply_options, sample_groups

_PREFIX = "BFCL_v4_"
# Its names of types, which are Python's, in JSON Schema's words; None allows all.
_TYPES: Mapping[str, str | None] = {"dict": "object", "float": "number", "tuple": "array", "any": None}
_LONGEST = 12  # characters of a piece that a reply is cut into
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One entry."""

    id: str
    messages: list[dict[str, Any]]  # that ask for the calls
    tools: list[dict[str, Any]]  # as OpenAI shapes them
    truth: list[Call]  # calls that are right


@dataclass
class CallOutcome:
    """Outcome of a group of entries."""

    entries: int = 0
    compiled: Counter[str] = field(default_factory=Counter)  # entries whose functions compile, by format
    refused: Counter[str] = field(default_factory=Counter)  # reasons, by how often
    compile_ms: list[float] = field(default_factory=list)  # of all grammars that compile
    truths: int = 0  # true calls in all; of those, valid by their schema
    truths_valid: int = 0
    # Entries whose true calls were read back as they were, by format.
    read_back: Counter[str] = field(default_factory=Counter)
    called: int = 0  # replies with calls, whole ones; of those, with valid arguments throughout
    valid: int = 0
    calls: int = 0  # in those replies
    cut: int = 0  # replies that ran out of tokens, and prompts larger than the context
    invalid: dict[str, str] = field(default_factory=dict)  # what is wrong with a reply's calls, by entry

    def add(self, other: CallOutcome) -> None:
        """Add another group's outcome."""
        for name in vars(self):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, mine | theirs if isinstance(mine, dict) and name == "invalid" else mine + theirs)

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        times = sorted(self.compile_ms)
        return {**vars(self), "compile_ms": {p: percentile(times, p) for p in (50, 99)}}


def json_schema(described: Any) -> Any:
    """A schema as BFCL writes it, as JSON Schema."""
    if not isinstance(described, Mapping):
        return described
    schema = {name: value for name, value in described.items() if name not in ("optional", "default", "format")}
    kind = schema.pop("type", None)
    to = _TYPES.get(kind, kind) if isinstance(kind, str) else kind
    if to is not None:
        schema["type"] = to
    if isinstance(schema.get("properties"), Mapping):
        schema["properties"] = {name: json_schema(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = json_schema(schema["items"])
    return schema


def read_entries(folder: Path, sample: int | None, seed: int = 0) -> dict[str, list[Entry]]:
    """Entries by group; a sample takes the same share of each.

    Raises:
        UsageError: the folder has none.
    """
    groups = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        answers = {line["id"]: line["ground_truth"] for line in _lines(folder / "possible_answer" / path.name)}
        groups[path.stem.removeprefix(_PREFIX)] = [_entry(line, answers[line["id"]]) for line in _lines(path)]
    if not any(groups.values()):
        raise UsageError(f"{folder} has no entries.", f"Give the folder of BFCL's {_PREFIX}*.json files.")
    return sample_groups(groups, sample, seed)


def run_entry(model: edgeinfer.Model, entry: Entry, **options: Any) -> CallOutcome:
    """Everything about one entry.

    Args:
        options: of the forced reply.
    """
    found = CallOutcome(entries=1)
    try:
        functions = read_functions(entry.tools)
    except UsageError as error:
        found.refused[error.message] += 1
        return found
    for form in FORMATS.values():
        _compile(model, form, functions, found)
        found.read_back[form.name] += _read_back(form, entry.truth)
    schemas = {function.name: function.arguments for function in functions}
    found.truths = len(entry.truth)
    found.truths_valid = sum(not _wrong(schemas, call) for call in entry.truth)
    if found.compiled:
        _force(model, entry, schemas, found, options)
    return found


def _lines(path: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", "Give the folder of BFCL's files.") from error


def _entry(line: Mapping[str, Any], truth: Sequence[Mapping[str, Any]]) -> Entry:
    tools = [
        {"type": "function", "function": {**function, "parameters": json_schema(function["parameters"])}}
        for function in line["function"]
    ]
    calls = [(name, _first(arguments)) for call in truth for name, arguments in call.items()]
    return Entry(line["id"], line["question"][0], tools, calls)


def _first(possible: Mapping[str, Any]) -> dict[str, Any]:
    """The first possible value of each argument; "" among the values means that it may be left out."""
    values = {name: [value for value in choices if value != ""] for name, choices in possible.items()}
    return {name: _plain(choices[0]) for name, choices in values.items() if choices}


def _plain(value: Any) -> Any:
    """An object whose members have one value instead of several possible ones."""
    if isinstance(value, Mapping):
        return _first(value)
    return list(map(_plain, value)) if isinstance(value, list) else value


def _compile(model: edgeinfer.Model, form: ToolFormat, functions: tuple[ToolFunction, ...], found: CallOutcome) -> None:
    try:
        grammar = calls_grammar(form, ToolChoice("auto", functions, several=True), None)
        with model.stream(".", grammar=grammar, max_tokens=1) as stream:
            costs = stream.grammar_costs
    except GrammarError as error:
        found.refused[error.message] += 1
        return
    assert costs is not None, "a grammar was asked for"
    found.compiled[form.name] += 1
    found.compile_ms.append(costs.compile_ms)


def _read_back(form: ToolFormat, truth: Sequence[Call]) -> bool:
    """Whether calls in pieces are read as they were written; one by one if the format allows no more."""
    groups = [truth] if form.several else [[call] for call in truth]
    return all(_read(form, _written(form, calls)) == list(calls) for calls in groups)


def _written(form: ToolFormat, calls: Sequence[Call]) -> str:
    """The text of calls in this format."""
    texts = [form.head(name) + json.dumps(arguments, ensure_ascii=False) + form.tail for name, arguments in calls]
    return form.prefix + form.between.join(texts) + form.suffix


def _read(form: ToolFormat, text: str) -> list[Call]:
    draw, reader, pieces = random.Random(text), CallReader(form), []
    while text:
        size = draw.randint(1, _LONGEST)
        pieces += reader.push(Chunk(text[:size], ()))
        text = text[size:]
    names: list[str] = []
    arguments: list[str] = []
    for piece in [*pieces, *reader.finish()]:
        if isinstance(piece, CallPiece):
            names.append(piece.name)
            arguments.append("")
        elif isinstance(piece, ArgumentsPiece):
            arguments[piece.place] += piece.text
    return [(name, json.loads(given)) for name, given in zip(names, arguments, strict=True)]


def _force(
    model: edgeinfer.Model, entry: Entry, schemas: Mapping[str, Any], found: CallOutcome, options: Mapping[str, Any]
) -> None:
    request = {"tools": entry.tools, "tool_choice": "required", **options}
    try:
        answer = model.create_chat_completion(entry.messages, **request)
    except RequestError as error:
        if error.code != "context_length_exceeded":
            raise
        found.cut += 1
        return
    assert isinstance(answer, dict), "no stream was asked for"
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "tool_calls":
        found.cut += 1
        return
    found.called += 1
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    found.calls += len(functions)
    try:
        calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    except ValueError as error:
        found.invalid[entry.id] = f"not JSON: {error}"
        return
    wrong = next(filter(None, (_wrong(schemas, call) for call in calls)), "")
    if wrong:
        found.invalid[entry.id] = wrong
    found.valid += not wrong


def _wrong(schemas: Mapping[str, Any], call: Call) -> str:
    """The error of a call; empty if it is valid."""
    import jsonschema

    name, arguments = call
    if name not in schemas:
        return f"{name} is not offered"
    try:
        jsonschema.Draft202012Validator(schemas[name]).validate(arguments)
    except jsonschema.ValidationError as error:
        return f"{name}: {error.message[:200]}"
    return ""


_HEADER = ("group", "compiled", "compile p50 ms", "p99", "read back", "truth valid", "valid/whole", "calls", "cut")


def _row(name: str, found: CallOutcome) -> list[str]:
    grammars, times = len(FORMATS) * found.entries, found.figures()["compile_ms"]
    return [
        name,
        f"{found.compiled.total()}/{grammars}",
        *("-" if times[p] is None else f"{times[p]:.3g}" for p in (50, 99)),
        f"{found.read_back.total()}/{grammars}",
        f"{found.truths_valid}/{found.truths}",
        f"{found.valid}/{found.called}",
        str(found.calls),
        str(found.cut),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tool_calls", description=__doc__)
    add_reply_options(parser, "BFCL's files", "entries")
    parser.add_argument("--several", action="store_true", help="let a reply make several calls")
    parser.add_argument("-c", "--context", type=int, default=1024)
    options = parser.parse_args(arguments)
    try:
        groups = read_entries(options.data, options.sample, options.seed)
        reply = {"max_tokens": options.max_tokens, "temperature": options.temp, "seed": options.seed}
        reply["parallel_tool_calls"] = options.several
        results, total = {}, CallOutcome()
        with edgeinfer.load(options.model, threads=options.threads, context=options.context) as model:
            # What is made once per model is no grammar's cost.
            model.generate(".", json_object=True, max_tokens=1)
            for name, entries in groups.items():
                results[name] = CallOutcome()
                for entry in entries:
                    results[name].add(run_entry(model, entry, **reply))
                total.add(results[name])
    except EdgeInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print_table(
        Table("Calls of BFCL's functions", _HEADER, [*(_row(*item) for item in results.items()), _row("all", total)])
    )
    print_table(
        Table("Refused", ("reason", "grammars"), [[why, str(count)] for why, count in total.refused.most_common(12)])
    )
    print_table(Table("Invalid", ("entry", "what is wrong"), [list(item) for item in total.invalid.items()][:12]))
    if options.out:
        figures = {name: found.figures() for name, found in results.items()} | {"all": total.figures()}
        options.out.write_text(script_json("tool_calls", figures), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
