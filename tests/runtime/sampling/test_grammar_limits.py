"""Grammars that would take too much are refused before they stop a program; large but harmless ones are taken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from edgeinfer.errors import BackendError, GrammarError, UsageError
from edgeinfer.runtime.sampling import grammar_trial
from edgeinfer.runtime.sampling.grammar_source import MAX_SOURCE
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.runtime.sampling.conftest import drawn, made, text_of

pytest.importorskip("llguidance")


def chain(count: int, below: Callable[[str], Any]) -> dict[str, Any]:
    defs = {f"d{i}": below(f"#/$defs/d{i + 1}") for i in range(count)} | {f"d{count}": {"type": "string"}}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "references": {"json_schema": chain(20_000, lambda to: {"type": "array", "items": {"$ref": to}})},
    "alternatives": {"json_schema": chain(20_000, lambda to: {"anyOf": [{"$ref": to}, {"type": "integer"}]})},
    "product": {"json_schema": {"allOf": [
        {"oneOf": [{"type": "object", "properties": {"k": {"const": f"{i}-{j}"}}} for j in range(6)]} for i in range(14)
    ]}},
    "multiple": {"json_schema": {"type": "integer", "multipleOf": 1_000_003_000_000_007}},
    "properties": {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(40_000)}}},
    "depth": {"json_schema": nested(5000)},
    "deep text": {"json_schema": '{"items":' * 50_000 + "{}" + "}" * 50_000},
    "long": {"json_schema": {"const": "x" * MAX_SOURCE}},
    "rules": {"grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(20_000)) + 'r20000: "b"'},
    "parentheses": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "expression": {"regex": "a?" * 20_000},
    "overlap": {"grammar": "start: A\nA: " + " & ".join(f"/.*{chr(97 + i)}.{{{i}}}/" for i in range(20))},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_take_too_long_is_refused(name: str, byte_level: Tokenizer) -> None:
    with pytest.raises(UsageError):
        made(byte_level, **BOMBS[name])


def test_a_trial_ends_after_some_seconds(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the limits that the process has of its own, which other systems do not know."""
    limits: list[float] = []
    run = subprocess.run

    def waits(command: list[str], *, input: bytes, timeout: float, **options: Any) -> Any:
        limits.append(timeout)
        return run([sys.executable, "-c", "import time; time.sleep(1000)"], input=input, timeout=0.3, **options)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", waits)
        with pytest.raises(BackendError, match="not found out in time"):
            made(byte_level, regex="a{1234}")
        patched.setattr(grammar_trial, "_BOUNDED", False)
        with pytest.raises(GrammarError, match="too large, too deeply nested or too ambiguous"):
            made(byte_level, regex="b{1234}")
    assert len(limits) == 2 and max(limits) <= 10
    # A machine that slept is no reason to refuse a grammar for good.
    assert len(made(byte_level, regex="a{1234}").allowed())


def test_where_nothing_can_be_tried_only_what_is_harmless_is_taken(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **options: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(UsageError, match=r"without trying it in another process first \(no more processes\)"):
        made(byte_level, regex="c{1234}")
    assert len(made(byte_level, regex="c{123}").allowed())


def test_large_but_harmless(byte_level: Tokenizer) -> None:
    """What is tried in another process first is used all the same."""
    values = [f"value number {i}" for i in range(2000)]
    constraint = made(byte_level, json_schema={"enum": values})
    reply = drawn(constraint, (1,), 0)
    assert reply is not None and json.loads(text_of(byte_level, reply)) in values
    constraint = made(byte_level, grammar='start: r{1000000}\nr: "a" | "b"')
    assert drawn(constraint, (1,), 0) is None
    constraint = made(byte_level, json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 10**9})
    assert drawn(constraint, (1,), 0) is None
    # All of this one is certain, which is more than the engine looks ahead.
    constraint = made(byte_level, json_schema={"type": "array", "items": {"type": "null"}, "minItems": 10**9})
    with pytest.raises(UsageError, match="became too complex"):
        drawn(constraint, (1,), 0)


def test_a_reply_that_becomes_too_complex_is_an_error(byte_level: Tokenizer) -> None:
    rules = "".join(f'r{i}: "x" /[a-z]/ "{i}"\n' for i in range(3000))
    constraint = made(
        byte_level, grammar='start: "ab" x\nx: ' + " | ".join(f"r{i}" for i in range(3000)) + "\n" + rules
    )
    with pytest.raises(UsageError, match=r"became too complex after \d tokens: .*2000"):
        drawn(constraint, (1,), 0)


@pytest.mark.clock
def test_masks_of_large_vocabularies_are_quick(byte_level: Tokenizer) -> None:
    """Not by a loop over tokens; the bound is loose, for machines that are busy."""
    constraint = made(byte_level, size=150_000, json_schema={"type": "string"})
    constraint.push(byte_level.encode('"', add_special_tokens=False)[0])
    for _ in range(20):
        constraint.push(byte_level.encode("a", add_special_tokens=False)[0])
        constraint.allowed()
    assert sorted(constraint.costs.mask_ms)[10] < 20


def test_grammars_are_tried_where_the_system_keeps_no_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS refuses to set one."""
    resource = pytest.importorskip("resource")
    kept = []

    def set_limit(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        kept.append(kind)

    monkeypatch.setattr(resource, "setrlimit", set_limit)
    grammar_trial._bounded()
    assert kept == [resource.RLIMIT_CPU, resource.RLIMIT_CORE]
