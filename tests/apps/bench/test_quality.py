"""`bench quality`: which stories are read, how smaller forms stand beside their reference, which answers are right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax

import edgeinfer
from edgeinfer.apps.bench.prompts import Prompt
from edgeinfer.apps.bench.quality import quality_chart, quality_section
from edgeinfer.apps.bench.quality_measure import Material, Quality, layout_differences, measure_family, score_tasks
from edgeinfer.apps.bench.quality_variants import Family, Variant, checkpoint_family, given_family
from edgeinfer.apps.bench.render import section_markdown
from edgeinfer.apps.bench.texts import read_stories
from edgeinfer.apps.cli.main import main
from edgeinfer.errors import NativeUnavailableError, TemplateError, UsageError
from edgeinfer.runtime.native.library import native_kernel
from tests.apps.bench.here import exported, exports_here
from tests.factories import make_checkpoint
from tests.speculation import needs_builtin
from tests.tables import each_row

STORIES = ("Once upon a time there was a little dog.", "She said: no.")


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Exports are from the cache."""
    with pytest.MonkeyPatch.context() as patch:
        exports_here(patch, "quality_measure")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "model"
    make_checkpoint(folder, "llama")
    return folder


def measured(checkpoint: Path, stories: Sequence[str] = STORIES, **options: Any) -> tuple[Quality, ...]:
    family = checkpoint_family(checkpoint, **{"layouts": ["portable"]} | options)
    return measure_family(family, Material(tuple(stories), STORIES)).subjects


def needs_the_kernel() -> None:
    """Skips a test of what only the native kernel has: its layout, and caches other than float32."""
    try:
        native_kernel()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def test_the_last_stories_are_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one<|endoftext|>two <|endoftext|>\n three<|endoftext|>\n", "utf-8")
    assert read_stories(path, 2) == ["two", "three"]
    assert read_stories(path, 2, skip=1) == ["one", "two"]
    assert read_stories(path, 9) == ["one", "two", "three"]
    with pytest.raises(UsageError, match="skipped"):
        read_stories(path, 2, skip=3)
    path.write_text(" ", "utf-8")
    with pytest.raises(UsageError, match="no stories"):
        read_stories(path, 2)
    with pytest.raises(UsageError, match="Cannot read"):
        read_stories(tmp_path / "none", 2)


def test_widths_and_caches_are_compared_with_float32(checkpoint: Path) -> None:
    needs_the_kernel()
    results = measured(checkpoint, widths=["8", "4", "4small"], caches=["int8", "int4"], layouts=[None])
    labels = ["32 bits", "8 bits", "4 bits", "4 bits, small layers too", "8 bits, int8 cache", "8 bits, int4 cache"]
    assert [r.variant.label.replace(", onnxruntime's operators", "") for r in results] == labels
    baseline, eight, _, small, cache8, cache4 = results
    assert (baseline.agreement, baseline.divergence) == (1.0, (0.0, 0.0))
    bits = [r.bits_per_weight for r in results[:4]]
    assert bits == sorted(bits, reverse=True) and eight.bytes < baseline.bytes
    # Rounding to eight bits changes the perplexity of any model by little, and by something.
    assert 0 < abs(eight.perplexity / baseline.perplexity - 1) < 0.05
    assert 0 < eight.divergence[0] < small.divergence[0]
    assert (small.divergences > 0).all()
    assert cache4.cache_bytes < cache8.cache_bytes < eight.cache_bytes
    assert cache8.bytes == eight.bytes and cache8.divergence[0] < cache4.divergence[0]


def test_methods_of_quantizing_are_compared(checkpoint: Path) -> None:
    family = checkpoint_family(checkpoint, ["4small"], methods=["rtn", "gptq"], group_sizes=[32])
    results = measure_family(family, Material(STORIES, ("The dog is here. " * 20,), 64)).subjects
    labels = [result.variant.scheme for result in results[1:]]
    assert labels == [f"4 bits, small layers too, {method}, groups of 32" for method in ("rtn", "gptq")]
    assert results[1].bytes == results[2].bytes and results[1].divergence != results[2].divergence


@pytest.mark.gguf
def test_types_of_llama_cpp_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    make_checkpoint(tmp_path / "model", "llama", intermediate_size=128)
    family = checkpoint_family(tmp_path / "model", [], types=["Q8_0", "Q4_0"])
    reference, eight, four = measure_family(family, Material(STORIES, ("The dog is here. " * 20,), 64)).subjects
    assert (eight.variant.label, four.variant.label) == ("Q8_0", "Q4_0")
    assert reference.bytes > eight.bytes > four.bytes and 0 < eight.divergence[0] < four.divergence[0]
    # Tensors alone count, not the vocabulary beside them in the file.
    assert 8 < eight.bits_per_weight < 9 and 4 < four.bits_per_weight < 6


def test_divergence_is_that_of_the_distributions(checkpoint: Path, tmp_path: Path) -> None:
    result = measured(checkpoint, STORIES[:1], widths=["4small"], group_sizes=[32])[1]
    logits = []
    assert result.variant.export is not None
    for number, options in enumerate((["--bits", "32"], result.variant.export)):
        bundle = exported(checkpoint, tmp_path / str(number), *options)
        with edgeinfer.load(bundle, speculation="off", native=False if number else None) as model:
            ids = model.tokenize(STORIES[0])
            ids = ids if ids[:1] == model.begin_ids else model.begin_ids + ids
            logits.append(np.concatenate([rows.astype(np.float64) for rows in model.logits(ids)]))
            perplexity = model.score(ids).perplexity
    reference, variant = (log_softmax(each, axis=1) for each in logits)
    wanted = (np.exp(reference) * (reference - variant)).sum(axis=1)
    np.testing.assert_allclose(result.divergences, wanted, atol=1e-12)
    assert result.divergence[0] == pytest.approx(wanted.mean())
    assert result.perplexity == pytest.approx(perplexity)


def test_stories_of_any_length_are_read(checkpoint: Path) -> None:
    """Logits come in arrays of 16 rows; the last token of a story, which has no target, may be alone in one."""
    # Each letter is a token of the byte-level vocabulary, after the begin token.
    lengths = (2, 16, 17, 18)
    (result,) = measured(checkpoint, [("xyz" * 6)[: tokens - 1] for tokens in lengths], widths=[])
    assert len(result.divergences) == sum(lengths)


@pytest.mark.slow
def test_layouts_of_the_same_weights_stand_side_by_side(checkpoint: Path) -> None:
    needs_the_kernel()
    results = measured(checkpoint, widths=["4small"], group_sizes=[32, 64], layouts=["native", "portable"])
    differences = layout_differences(results)
    small = "4 bits, small layers too, groups of {}"
    assert [d.scheme for d in differences] == [small.format(32), small.format(64)]
    for number, difference in enumerate(differences):
        native, portable = results[1 + 2 * number : 3 + 2 * number]
        assert difference.layouts == ("native", "portable")
        assert difference.mean == pytest.approx(native.divergence[0] - portable.divergence[0])
        # The same weights and the same class of arithmetic.
        assert abs(difference.mean) < 0.1 * portable.divergence[0]


def test_what_cannot_be_had_is_skipped_with_the_reason(checkpoint: Path) -> None:
    family = checkpoint_family(checkpoint, ["4"], budgets=[0.1])
    results = measure_family(family, Material(STORIES, STORIES))
    assert [each.variant.scheme for each in results.subjects] == ["32 bits", "4 bits"]
    (skipped,) = results.skipped
    assert skipped.variant == "budget of 0.1 bits" and "cannot be exported" in skipped.reason
    with pytest.raises(UsageError, match=r"config\.json"):
        measure_family(checkpoint_family(checkpoint.parent, []), Material(STORIES))


@needs_builtin
def test_models_with_other_tokens_are_not_compared(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "bundle", "--bits", "8")
    family = Family("tales", Variant("tales", None), (Variant("other", str(tmp_path / "bundle")),))
    (skipped,) = measure_family(family, Material(STORIES)).skipped
    assert "other tokens" in skipped.reason or "vocabularies" in skipped.reason


def test_names_of_given_models() -> None:
    family = given_family(["a/eight", "b/four"], None, ["int8"])
    assert family.reference.label == "eight"
    assert [each.label for each in family.variants] == ["four", "eight, int8 cache", "four, int8 cache"]
    family = given_family(["a/same", "b/same"], "c/32", [])
    assert (family.model, [each.label for each in family.variants]) == ("c/32", ["a/same", "b/same"])


class Parrot:
    """Says one thing, and foresees it wherever it is."""

    context = 40

    def __init__(self, says: str) -> None:
        self.says = says

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def tokenize_chat(self, messages: Sequence[Any]) -> list[int]:
        return self.tokenize(messages[-1]["content"])

    def generate(self, prompt: Sequence[int], *, max_tokens: int) -> Any:
        return SimpleNamespace(text=self.says[:max_tokens])

    def logits(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        start = len(tokens) - len(self.says) - 1
        for index in range(len(tokens)):
            row = np.zeros((1, 128), np.float32)
            place = index - start
            row[0, ord(self.says[place]) if 0 <= place < len(self.says) else 0] = 1
            yield row


def question(answer: str, asked: str = "what?") -> Prompt:
    return Prompt("kind", "name", ({"role": "user", "content": asked},), answer)


def test_answers_are_right_letter_for_letter() -> None:
    told: list[None] = []
    score = score_tasks(Parrot("a dog"), [question("a dog"), question("a cat")], lambda: told.append(None))["kind"]
    assert (score.right, score.of, score.tokens_right, score.tokens) == (1, 2, 7, 10)
    assert len(told) == 2
    # One that says more is wrong, and so is a question too long for the context.
    assert score_tasks(Parrot("a dog!"), [question("a dog")], lambda: None)["kind"].right == 0
    long = score_tasks(Parrot("a dog"), [question("a dog", "?" * 36)], lambda: None)["kind"]
    assert (long.right, long.of, long.tokens_right) == (0, 1, 0)


def test_models_that_do_not_chat_are_not_asked() -> None:
    class Silent(Parrot):
        def tokenize_chat(self, messages: Sequence[Any]) -> list[int]:
            raise TemplateError("none", "hint")

    assert score_tasks(Silent("x"), [question("x")], lambda: None) == {}


@pytest.mark.slow
@needs_builtin
def test_the_command_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "quality.json", tmp_path / "quality.svg"
    assert main(["bench", "quality", "--stories", "1", "--questions", "1", "--json", str(out), "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["benchmark"] == "quality" and data["command"].startswith("edgeinfer")
    assert {"test_time", "edgeinfer", "environment"} <= set(data)
    assert [each["cache"] for each in data["subjects"]] == [None, "int8", "int4", None]
    for each in data["subjects"]:
        assert set(each["tasks"]) == {"tales/retell", "tales/again", "tales/start", "tales/who"}
        assert all(score["of"] == 1 for score in each["tasks"].values())
        assert f"| {each['variant']} |" in text
    assert section_markdown(quality_section(data)).partition("\n\n|")[2] == text.partition("\n\n|")[2]
    assert "KL divergence, nats per token" in svg.read_text()


def test_the_command_on_a_checkpoint_and_on_bundles(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text(
        "<|endoftext|>".join([*(story * 8 for story in STORIES), "The cat sat on the mat, and the dog did not."])
    )
    line = [
        "bench",
        "quality",
        "--text",
        str(text),
        "--stories",
        "1",
        "--calibration",
        "2",
        "--questions",
        "0",
        "--calibration-tokens",
        "64",
    ]
    line += ["--json", str(tmp_path / "out.json")]
    assert main([*line, "--checkpoint", str(checkpoint), "--bits", "8", "--budget-bits", "9"]) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert [each["variant"] for each in data["subjects"]] == ["32 bits", "8 bits", "budget of 9 bits"]
    assert data["text"] == "1 stories of text" and data["subjects"][0]["tasks"] == {}
    for bits in ("32", "8"):
        exported(checkpoint, tmp_path / bits, "--bits", bits)
    models = ["-m", str(tmp_path / "8"), "--reference", str(tmp_path / "32")]
    needs_the_kernel()
    assert main([*line, *models, "--kv", "int8"]) == 0
    again = json.loads((tmp_path / "out.json").read_text())
    assert [each["variant"] for each in again["subjects"]] == ["32", "8", "8, int8 cache"]
    assert again["subjects"][1]["divergence"] == pytest.approx(data["subjects"][1]["divergence"], rel=0.2)
    # Only the native kernel has caches other than float32.
    monkeypatch.setenv("EDGEINFER_NATIVE", "0")
    assert main([*line, *models, "--kv", "int8"]) == 0
    portable = json.loads((tmp_path / "out.json").read_text())
    assert [each["variant"] for each in portable["skipped"]] == ["8, int8 cache"]
    assert "8, int8 cache: skipped" in capsys.readouterr().out


@each_row(
    ("wrong", "says"),
    [
        (["--checkpoint", ".", "--bits", "5"], "'5'"),
        (["--checkpoint", ".", "--layouts", "tiled"], "tiled"),
        (["--kv", "int3"], "int3"),
        (["--stories", "0"], "at least one story"),
        (["--budget-bits", "3"], "--text"),
        (["--methods", "rtn,gptq"], "--text"),
        (["--types", "Q4_0"], "--text"),
        (["--reference", "x"], "-m"),
        (["--text", "none"], "none"),
        (["--data", "none"], "none"),
    ],
)
def test_bad_input_is_one_line(wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", *wrong]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1


def test_the_chart_has_what_is_above_zero() -> None:
    def subject(divergence: float, weights: str, cache: str | None) -> dict[str, Any]:
        sizes = {"bytes": 3_000_000, "cache_bytes": 1_000_000}
        return {"model": "m", "weights": weights, "cache": cache, "divergence": divergence, **sizes}

    chart = quality_chart([subject(0.0, "32 bits", None), subject(0.1, "8 bits", None), subject(0.2, "8 bits", "int8")])
    assert [(line.name, line.points, line.marks) for line in chart.lines] == [
        ("m, weights", ((4.0, 0.1),), ("8 bits",)),
        ("m, caches", ((4.0, 0.2),), ("int8",)),
    ]
