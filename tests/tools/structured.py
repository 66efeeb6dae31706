"""Replies by the schemas of jsonschemabench: which compile, what a mask costs, how many replies are valid.

    python -m tests.tools.structured DATA/jsonschemabench --sample 300 --max-tokens 256

A reply that `max_tokens` cuts short is no document and counts apart; `jsonschema` judges all others, formats included.
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
from typing import Any, TypeVar

import edgeinfer
from edgeinfer.apps.bench.render import Table, print_table
from edgeinfer.errors import EdgeInferError, UsageError
from tests.tools.figures import percentile, script_json

T = TypeVar("T")
_PROMPT = "Write a JSON document:\n"
_SHOWN = 12  # reasons of refusals


@dataclass
class Followed:
    """Outcome of a group of schemas."""

    schemas: int = 0  # tried
    refused: Counter[str] = field(default_factory=Counter)  # reasons, by how often
    compile_ms: list[float] = field(default_factory=list)  # of those that compile, with the first mask
    mask_ms: list[float] = field(default_factory=list)  # of all masks
    valid: int = 0  # replies that the schema allows
    # Ids of schemas whose complete reply it does not allow, with what is wrong.
    invalid: dict[str, str] = field(default_factory=dict)
    cut: int = 0  # replies that ran out of tokens
    failed: dict[str, str] = field(default_factory=dict)  # ids of schemas whose reply could not go on, with the reason

    def add(self, other: Followed) -> None:
        """Add another group's outcome."""
        self.schemas += other.schemas
        self.refused += other.refused
        self.compile_ms += other.compile_ms
        self.mask_ms += other.mask_ms
        self.valid += other.valid
        self.invalid |= other.invalid
        self.cut += other.cut
        self.failed |= other.failed

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "schemas": self.schemas,
            "compiled": len(self.compile_ms),
            "refused": dict(self.refused.most_common()),
            "compile_ms": {"p50": percentile(self.compile_ms, 50), "p99": percentile(self.compile_ms, 99)},
            "mask_ms": {"p50": percentile(self.mask_ms, 50), "p99": percentile(self.mask_ms, 99)},
            "masks": len(self.mask_ms),
            "replies": len(self.compile_ms),
            "valid": self.valid,
            "invalid": self.invalid,
            "cut": self.cut,
            "failed": self.failed,
        }


def read_schemas(folder: Path, sample: int | None, seed: int = 0) -> dict[str, list[Mapping[str, Any]]]:
    """Cases by group; a sample takes the same share of each.

    Raises:
        UsageError: the folder has none.
    """
    groups = {}
    for path in sorted(folder.glob("*.jsonl")):
        groups[path.stem] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    if not any(groups.values()):
        raise UsageError(f"{folder} has no schemas.", "Give the folder of jsonschemabench's .jsonl files.")
    return sample_groups(groups, sample, seed)


def sample_groups(groups: Mapping[str, Sequence[T]], sample: int | None, seed: int) -> dict[str, list[T]]:
    """`count` items in all, the same share of each group but at least one; None is all of them."""
    share = 1.0 if sample is None else min(1.0, sample / sum(map(len, groups.values())))
    draw = random.Random(seed)
    return {name: draw.sample(items, max(1, round(share * len(items)))) for name, items in groups.items()}


def add_reply_options(parser: argparse.ArgumentParser, data: str, items: str) -> None:
    """Options of scripts whose model replies to the items of a data set.

    Args:
        data: what the folder of the data set holds.
        items: what it is made of.
    """
    parser.add_argument("data", type=Path, help=f"folder of {data}")
    parser.add_argument("-m", "--model", help="as for edgeinfer run; the built-in one without it")
    parser.add_argument("--sample", type=int, help=f"{items} in all; every one without it")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def follow(model: edgeinfer.Model, cases: Sequence[Mapping[str, Any]], **options: Any) -> Followed:
    """One reply by each schema.

    Args:
        cases: with `id` and `schema`.
        options: of the replies.
    """
    found = Followed()
    for case in cases:
        found.schemas += 1
        schema = case["schema"]
        try:
            stream = model.stream(_PROMPT, json_schema=schema, **options)
        except UsageError as error:
            found.refused[_reason(error)] += 1
            continue
        costs = stream.grammar_costs
        assert costs is not None
        found.compile_ms.append(costs.compile_ms)
        try:
            result = stream.complete()
        except UsageError as error:
            found.failed[case["id"]] = error.message
            continue
        finally:
            found.mask_ms += costs.mask_ms
        if result.finish_reason != "stop":
            found.cut += 1
        elif wrong := _wrong(schema, result.text):
            found.invalid[case["id"]] = wrong
        else:
            found.valid += 1
    return found


def _wrong(schema: Mapping[str, Any], text: str) -> str:
    """The error of a document; empty if it is valid."""
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"{error.validator}: {error.message[:200]}"
    except Exception as error:  # the schema itself, such as references that nothing resolves
        return f"cannot be validated: {type(error).__name__}"
    return ""


def _reason(error: UsageError) -> str:
    """The reason without the parts that differ from schema to schema."""
    reason = error.message.removeprefix("The schema or grammar cannot be used: ")
    if reason.endswith(" is not supported."):
        return ", ".join(sorted(reason.removesuffix(" is not supported.").split(", "))) + " is not supported"
    return reason.split(":")[0].split(" /")[0].split(" '")[0].rstrip(".")


def _row(name: str, found: Followed) -> list[str]:
    figures = found.figures()
    times = [figures[kind][p] for kind in ("compile_ms", "mask_ms") for p in ("p50", "p99")]
    complete = figures["replies"] - found.cut - len(found.failed)
    return [
        name,
        f"{figures['compiled']}/{found.schemas}",
        *("-" if value is None else f"{value:.3g}" for value in times),
        f"{found.valid}/{complete}",
        str(found.cut),
        str(len(found.failed)),
    ]


_HEADER = (
    "group",
    "compiled",
    "compile p50 ms",
    "p99",
    "mask p50 ms",
    "p99",
    "valid/complete",
    "cut",
    "failed",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="structured", description=__doc__)
    add_reply_options(parser, "jsonschemabench's .jsonl files", "schemas")
    parser.add_argument("--spec", default="off")
    options = parser.parse_args(arguments)
    try:
        groups = read_schemas(options.data, options.sample, options.seed)
        reply = {"max_tokens": options.max_tokens, "temperature": options.temp, "seed": options.seed}
        results, total = {}, Followed()
        with edgeinfer.load(options.model, threads=options.threads, context=options.max_tokens + 64) as model:
            # What is made once per model is no schema's cost.
            model.generate(_PROMPT, json_object=True, max_tokens=1)
            for name, cases in groups.items():
                results[name] = follow(model, cases, speculation=options.spec, **reply)
                total.add(results[name])
    except EdgeInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    rows = [_row(name, found) for name, found in results.items()]
    print_table(Table("Replies by JSON schema", _HEADER, [*rows, _row("all", total)]))
    reasons = [[reason, str(count)] for reason, count in total.refused.most_common(_SHOWN)]
    print_table(Table("Refused", ("reason", "schemas"), reasons))
    if options.out:
        figures = {name: found.figures() for name, found in results.items()} | {"all": total.figures()}
        options.out.write_text(script_json("structured", figures), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
