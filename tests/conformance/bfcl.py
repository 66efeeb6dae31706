"""Scores a model's calls on BFCL's files: `python -m tests.conformance.bfcl MODEL FOLDER --count 40`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

import edgeinfer

_KINDS = ("simple_python", "multiple", "parallel")
# BFCL's types, which are Python's, in JSON Schema.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


def schema_of(given: Any) -> Any:
    if isinstance(given, list):
        return list(map(schema_of, given))
    if not isinstance(given, Mapping):
        return given
    made = {key: schema_of(value) for key, value in given.items() if key not in ("optional", "default")}
    if isinstance(made.get("type"), str):
        kind = _TYPES.get(made["type"], made["type"])
        made = {**made, "type": kind} if kind else {key: value for key, value in made.items() if key != "type"}
    return made


def tasks(folder: Path, kind: str, count: int) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Every so many of the questions, with their answers."""
    name = f"BFCL_v4_{kind}.json"
    lines = (folder / name).read_text("utf-8").splitlines()
    answers = (folder / "possible_answer" / name).read_text("utf-8").splitlines()
    for place in range(0, len(lines), max(1, len(lines) // count)):
        yield json.loads(lines[place]), json.loads(answers[place])["ground_truth"]


def right(call: tuple[str, dict[str, Any]], wanted: Mapping[str, Any]) -> bool:
    """As BFCL's checker: the name, and for each argument one of the values that it lists; "" may be left out."""
    ((name, values),) = wanted.items()
    if call[0] != name or not call[1].keys() <= values.keys():
        return False
    return all(_is(call[1][key], allowed) if key in call[1] else "" in allowed for key, allowed in values.items())


def _is(value: Any, allowed: Sequence[Any]) -> bool:
    return any(_plain(value) == _plain(each) for each in allowed)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(character for character in value.lower() if character not in " ,./-_*^'\"")
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {
            key: _plain(each[0] if isinstance(each, list) and len(each) == 1 else each) for key, each in value.items()
        }
    return value


def ask(model: edgeinfer.Model, task: Mapping[str, Any], choice: str) -> tuple[str, list[tuple[str, Any]]]:
    """How the reply ended, and its calls."""
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {**each, "parameters": schema_of(each["parameters"])}}
        for each in task["function"]
    ]
    answer: Any = model.create_chat_completion(
        task["question"][0], tools=tools, tool_choice=choice, max_tokens=400, temperature=0
    )
    first, *_ = answer["choices"]
    message, reason = first["message"], first["finish_reason"]
    if reason == "length":
        return reason, []
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])
    return reason, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=40, help="questions of each kind")
    parser.add_argument("--choice", choices=("auto", "required"), default="auto")
    options = parser.parse_args()
    with edgeinfer.load(options.model, context=4096) as model:
        for kind in _KINDS:
            scores: Counter[str] = Counter()
            for task, wanted in tasks(options.folder, kind, options.count):
                try:
                    reason, calls = ask(model, task, options.choice)
                except (ValueError, jsonschema.ValidationError, edgeinfer.EdgeInferError) as error:
                    scores[f"malformed: {type(error).__name__}"] += 1
                    continue
                scores["asked"] += 1
                scores[f"ended by {reason}"] += 1
                scores["called"] += bool(calls)
                left = list(wanted)
                for call in calls:
                    left = (
                        left[: (at := next((n for n, each in enumerate(left) if right(call, each)), len(left)))]
                        + left[at + 1 :]
                    )
                scores["right"] += not left and len(calls) == len(wanted)
            print(options.choice, kind, dict(scores), flush=True)


if __name__ == "__main__":
    main()
