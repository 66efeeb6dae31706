"""c(m): every size in turns, never faster than the machine can be, drawn with units."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench.curve import Contender, CurveConfig, curve_section, run_curve
from edgeinfer.apps.bench.render import markdown
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import NativeUnavailableError, UsageError
from tests.apps.bench.here import known_limits
from tests.factories import make_bigram_bundle
from tests.speculation import needs_builtin
from tests.tables import each_row

CONFIG = CurveConfig((4, 2, 1), depths=(8,), repeats=3)


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    known_limits(monkeypatch)


def measured(model: edgeinfer.Model) -> dict[str, Any]:
    seen: list[tuple[int, int]] = []
    curve = run_curve([model], CONFIG, lambda done, total: seen.append((done, total)))
    assert seen == [(n, 3) for n in range(4)]
    return curve


@each_row("options", [{"sizes": ()}, {"sizes": (0, 1)}, {"depths": ()}, {"kv_types": ("int3",)}, {"repeats": 0}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    assert CurveConfig((8, 2)).sizes == (1, 2, 8)
    with pytest.raises(UsageError):
        CurveConfig(**options)


@needs_builtin
def test_points() -> None:
    with edgeinfer.load(context=64, threads=1, speculation="off") as model:
        curve = measured(model)
    points = curve["points"]
    assert [point["size"] for point in points] == [1, 2, 4] and curve["n_depth"] == 8
    assert points[0]["growth"]["median"] == 1 and curve["limits"]["threads"] == 1
    for point in points:
        assert point["ms"]["p25"] <= point["ms"]["median"] <= point["ms"]["p75"]
        assert 0 < point["limit_ms"] == max(point["read_ms"], point["multiply_ms"] or 0)


def test_limits_that_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(threads: int) -> None:
        raise NativeUnavailableError("There is no kernel.")

    with edgeinfer.load(make_bigram_bundle(tmp_path / "bigrams"), context=64) as model:
        # A bundle that does not list its weights; and a device that cannot be measured.
        assert all(point["limit_ms"] is None for point in measured(model)["points"])
        monkeypatch.setattr(edgeinfer.tools, "measure_device", unknown, raising=False)
        curve = measured(model)
    assert curve["limits"] is None and all(point["limit_ms"] is None for point in curve["points"])


@needs_builtin
def test_several_depths_and_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "curve", "--sizes", "1,2", "-r", "2", "-d", "40,8", "--kv-types", "float32,int8", "-t", "1"]
    out = tmp_path / "c.json"
    assert main([*line, "--speculation", "off", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    found = [(point["kv"], point["n_depth"], point["size"]) for point in data["points"]]
    assert sorted(found) == sorted((kv, d, m) for kv in ("float32", "int8") for d in (8, 40) for m in (1, 2))
    read = {(point["kv"], point["n_depth"]): point["read_ms"] for point in data["points"] if point["size"] == 1}
    # 32 tokens more are read, in a byte and a little more for each of a float's four.
    assert read["float32", 40] - read["float32", 8] > 3 * (read["int8", 40] - read["int8", 8]) > 0
    shown = capsys.readouterr().out
    assert main([*line, "--json", str(tmp_path / "no" / "c.json")]) == 5
    assert "c(m)/c(1)" in shown and "to 8 before" in shown and "float32" in shown and "times the limit" in shown


class Twice(Contender):
    """Another engine, whose times are fixed."""

    kv, threads = "llama.cpp float16", 2

    def passes(self, sizes: Sequence[int], depth: int) -> dict[int, float]:
        return {size: 1e6 * size for size in sizes}

    def prompt(self, tokens: int) -> float:
        return 1e9


@needs_builtin
def test_another_engine_is_compared_where_it_has_as_many_threads() -> None:
    config = CurveConfig((1, 2), depths=(8,), prompts=(16,), repeats=2)
    with ExitStack() as opened:
        models = [
            opened.enter_context(edgeinfer.load(context=64, threads=threads, speculation="off")) for threads in (1, 2)
        ]
        curve = run_curve(models, config, lambda done, total: None, peers=[Twice()])
    points = curve["points"]
    assert [(point["threads"], point["size"]) for point in points] == [(t, m) for t in (1, 2, 2) for m in (1, 2)]
    assert [point["peer"] is None for point in points] == [True, True, False, False, False, False]
    alone, same, theirs = curve["prompts"]
    assert alone["peer"] is None and same["limit_ms"] is not None and theirs["ms"]["median"] == 1e9
    assert same["peer"]["median"] > 1 and set(theirs["peer"].values()) == {1.0}
    shown = "\n\n".join(markdown(curve_section(curve).parts))
    assert "llama.cpp float16, 2 threads" in shown and "Milliseconds of a prompt" in shown


@pytest.mark.slow
@pytest.mark.gguf
@needs_builtin
def test_llamacpp_is_measured_on_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp")
    from tests.gguf_models import builtin_gguf

    sizes = "--sizes 1,2 -r 1 -d 8 -t 1 --prompts 8"
    line = ["bench", "curve", *sizes.split(), "--speculation", "off"]
    assert main([*line, "--gguf", str(builtin_gguf()), "--json", str(tmp_path / "c.json")]) == 0
    data = json.loads((tmp_path / "c.json").read_text())
    assert {point["kv"] for point in data["points"]} == {"float32", "llama.cpp float16"}
    assert all(point["peer"]["median"] > 0 and point["ms"]["median"] > 0 for point in data["points"])
    assert "llama.cpp to it" in capsys.readouterr().out
