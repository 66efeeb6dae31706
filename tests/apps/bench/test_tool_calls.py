"""The benchmark of BFCL's calls: types of Python in schemas, the first possible values, and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import UsageError
from tests.speculation import needs_builtin
from tests.tools.tool_calls import CallOutcome, Entry, json_schema, main, read_entries, run_entry

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "bfcl"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="BFCL is not here")
PARAMETERS = {
    "type": "dict",
    "properties": {
        "at": {"type": "tuple", "items": {"type": "float"}, "description": "Where."},
        "what": {"type": "any", "default": 5, "optional": True},
        "how": {"type": "dict", "properties": {"fast": {"type": "boolean"}}, "required": ["fast"]},
    },
    "required": ["at"],
}


def write(folder: Path) -> Path:
    """A data set of one entry."""
    (folder / "possible_answer").mkdir()
    entry = {
        "id": "one_0",
        "question": [[{"role": "user", "content": "Go"}]],
        "function": [{"name": "go.to", "description": "", "parameters": PARAMETERS}],
    }
    truth = {"go.to": {"at": [[1.5, 2], [2]], "what": ["", "x"], "how": [{"fast": [True, ""]}]}}
    (folder / "BFCL_v4_one.json").write_text(json.dumps(entry), "utf-8")
    answer = json.dumps({"id": "one_0", "ground_truth": [truth]})
    (folder / "possible_answer" / "BFCL_v4_one.json").write_text(answer, "utf-8")
    return folder


def test_types_become_json_schema() -> None:
    schema = json_schema(PARAMETERS)
    assert schema["type"] == "object"
    assert schema["properties"]["at"] == {"type": "array", "items": {"type": "number"}, "description": "Where."}
    assert schema["properties"]["what"] == {}
    assert schema["properties"]["how"]["properties"] == {"fast": {"type": "boolean"}}


def test_the_first_possible_values_are_the_truth(tmp_path: Path) -> None:
    (entry,) = read_entries(write(tmp_path), None)["one"]
    assert entry.truth == [("go.to", {"at": [1.5, 2], "what": "x", "how": {"fast": True}})]
    with pytest.raises(UsageError):
        read_entries(tmp_path / "possible_answer", None)


@needs_builtin
def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert main([str(write(tmp_path)), "--max-tokens", "200", "--temp", "1", "-t", "1", "--out", str(out)]) == 0
    figures: dict[str, Any] = json.loads(out.read_text("utf-8"))["all"]
    assert figures["entries"] == figures["truths"] == figures["truths_valid"] == 1
    assert figures["compiled"] == figures["read_back"] == {"hermes": 1, "mistral": 1, "llama3": 1}
    assert figures["valid"] == figures["called"] and figures["called"] + figures["cut"] == 1
    assert "Calls of BFCL's functions" in capsys.readouterr().out


@pytest.mark.slow
@needs_builtin
@needs_data
def test_real_entries() -> None:
    total = CallOutcome()
    with edgeinfer.load(threads=1, context=1024) as model:
        for entries in read_entries(DATA, 8).values():
            for entry in entries:
                total.add(run_entry(model, entry, max_tokens=300, temperature=1.0, seed=1, parallel_tool_calls=False))
    assert total.compiled.total() == total.read_back.total() == 3 * total.entries
    assert total.truths_valid == total.truths
    assert total.invalid == {} and total.called > total.entries // 4


@needs_builtin
def test_what_cannot_be_used_is_counted() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {"minProperties": 2}}},
    }
    with edgeinfer.load(threads=1, context=384) as model:
        found = run_entry(model, Entry("a", [{"role": "user", "content": "Go"}], [tool], [("f", {})]))
        assert found.compiled.total() == 0 and found.refused.total() == 3
        assert run_entry(model, Entry("a", [], [tool, tool], [])).refused.total() == 1
