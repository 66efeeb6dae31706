"""`bench quality`: variants of a model, divergence of distributions, answers letter for letter, and the command."""

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
from edgeinfer.apps.bench.quality import Measured, QualityOptions, Variant, measure_family, score_tasks
from edgeinfer.apps.bench.texts import Material, Prompt
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import CheckpointError, NativeUnavailableError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.native.library import native_kernel
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint
from tests.speculation import needs_builtin
from tests.tables import each_row

STORIES = ("Once upon a time there was a little dog.", "She said: no.")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "model"
    make_checkpoint(folder, "llama")
    return folder


def measured(checkpoint: Path, stories: Sequence[str] = STORIES, **options: Any) -> list[dict[str, Any]]:
    (family,) = QualityOptions(checkpoints=(checkpoint,), calibration="none", **options).families()
    found = Measured()
    measure_family(family, Material(tuple(stories)), lambda *_: None, found)
    assert not found.skipped
    return found.subjects


def needs_the_kernel() -> None:
    """Skip a test of what only the native kernel has: its layout, and caches other than float32."""
    try:
        native_kernel()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def test_forms_and_caches_are_compared_with_float32(checkpoint: Path) -> None:
    needs_the_kernel()
    results = measured(checkpoint, bits=("8", "4"), sizes=("60KB",), kv=("int8", "int4"))
    labels = ["32 bits", "8 bits", "4 bits", "within 60KB", "8 bits, int8 cache", "8 bits, int4 cache"]
    assert [each["variant"] for each in results] == labels
    baseline, eight, four, within, cache8, cache4 = results
    assert (baseline["agreement"], baseline["divergence"], baseline["seconds"] > 0) == (1.0, 0.0, True)
    sizes = [each["bytes"] for each in results[:3]]
    assert sizes == sorted(sizes, reverse=True) and within["bytes"] <= 60_000
    # Rounding to eight bits changes the perplexity of any model by little, and by something.
    assert 0 < abs(eight["perplexity"] / baseline["perplexity"] - 1) < 0.05
    assert 0 < eight["divergence"] < four["divergence"]
    assert cache4["cache_bytes"] < cache8["cache_bytes"] < eight["cache_bytes"]
    assert cache8["bytes"] == eight["bytes"] and cache8["divergence"] < cache4["divergence"]


def test_divergence_is_that_of_the_distributions(checkpoint: Path, tmp_path: Path) -> None:
    result = measured(checkpoint, STORIES[:1], bits=("4",))[1]
    logits = []
    for bits in (32, 4):
        bundle = export_checkpoint(checkpoint, tmp_path / str(bits), ExportConfig(bits=bits, calibration="none"))
        with edgeinfer.load(bundle, speculation="off") as model:
            ids = model.tokenize(STORIES[0])
            ids = ids if ids[:1] == model.begin_ids else model.begin_ids + ids
            logits.append(np.concatenate([rows.astype(np.float64) for rows in model.logits(ids)]))
            perplexity = model.score(ids).perplexity
    reference, variant = (log_softmax(each, axis=1) for each in logits)
    wanted = (np.exp(reference) * (reference - variant)).sum(axis=1)
    # The reference is kept in float16.
    assert result["divergence"] == pytest.approx(wanted.mean(), rel=0.02, abs=1e-5)
    assert result["perplexity"] == pytest.approx(perplexity)


def test_types_of_llama_cpp_are_made_by_its_quantizer(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from edgeinfer.export.gguf.route import write_float_file

    importance = write_float_file(checkpoint, tmp_path / "float.gguf", "default")
    assert importance is not None and "blk.0.ffn_down.weight" in importance
    _, eight, five = measured(checkpoint, bits=(), types=("Q8_0", "Q5_0"))
    assert (eight["variant"], five["variant"]) == ("Q8_0", "Q5_0")
    assert 0 < eight["divergence"] < five["divergence"] and five["bytes"] < eight["bytes"]


@pytest.mark.parametrize("wrong", ["1KB", "Q9"])
def test_variants_that_fail_are_skipped_with_the_reason(checkpoint: Path, wrong: str) -> None:
    sizes, types = ((), (wrong,)) if wrong == "Q9" else ((wrong,), ())
    (family,) = QualityOptions(
        checkpoints=(checkpoint,), bits=("8",), sizes=sizes, types=types, calibration="none"
    ).families()
    found = Measured()
    measure_family(family, Material(STORIES), lambda *_: None, found)
    assert [each["variant"] for each in found.subjects] == ["32 bits", "8 bits"]
    (skipped,) = found.skipped
    assert wrong in skipped["variant"] and skipped["reason"]
    with pytest.raises(CheckpointError, match=r"config\.json"):
        measured(checkpoint.parent)


@needs_builtin
def test_models_with_other_tokens_are_not_compared(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "bundle", ExportConfig(bits=8, calibration="none"))
    family = ("tales", [Variant("tales", None), Variant("other", str(tmp_path / "bundle"))])
    found = Measured()
    measure_family(family, Material(STORIES), lambda *_: None, found)
    assert "other tokens" in found.skipped[0]["reason"]


def test_names_of_given_models() -> None:
    ((name, variants),) = QualityOptions(models=("a/eight", "b/four"), kv=("int8",)).families()
    assert name == "eight"
    assert [each.label for each in variants] == ["eight", "four", "eight, int8 cache", "four, int8 cache"]
    ((name, variants),) = QualityOptions(models=("a/same", "b/same"), reference="c/32").families()
    assert (name, [each.label for each in variants]) == ("c/32", ["c/32", "a/same", "b/same"])


class Parrot:
    """Says one thing, and predicts it wherever it is."""

    context = 40

    def __init__(self, says: str) -> None:
        self.says = says

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def tokenize_chat(self, messages: Sequence[Any]) -> list[int]:
        return self.tokenize(messages[-1]["content"])

    def generate(self, prompt: Sequence[int], *, max_tokens: int, temperature: float) -> Any:
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


def scored(model: Any, *questions: Prompt) -> dict[str, int]:
    return score_tasks(model, questions)["kind"]


def test_answers_are_right_letter_for_letter() -> None:
    both = scored(Parrot("a dog"), question("a dog"), question("a cat"))
    assert both == {"right": 1, "of": 2, "tokens_right": 7, "tokens": 10}
    # One that says more is wrong, and so is a question too long for the context.
    assert scored(Parrot("a dog!"), question("a dog"))["right"] == 0
    long = scored(Parrot("a dog"), question("a dog", "?" * 36))
    assert (long["right"], long["of"], long["tokens_right"]) == (0, 1, 0)


@needs_builtin
def test_the_command_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quality.json"
    assert main(["bench", "quality", "--pieces", "1", "--questions", "1", "--json", str(out)]) == 0
    text, data = capsys.readouterr().out, json.loads(out.read_text())
    assert [each["cache"] for each in data["subjects"]] == [None, "int8", "int4"]
    for each in data["subjects"]:
        assert set(each["tasks"]) == {"tales/retell", "tales/again", "tales/start", "tales/who"}
        assert all(score["of"] == 1 for score in each["tasks"].values()) and each["variant"] in text


def test_the_command_on_a_checkpoint_and_on_bundles(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("<|endoftext|>".join([*(f"{n} {STORIES[0] * 8}" for n in range(200)), "The cat sat on the mat."]))
    line = ["bench", "quality", "--text", str(text), "--pieces", "1", "--questions", "0", "--json", str(out)]
    assert main([*line, "--checkpoint", str(checkpoint), "--bits", "8,6", "--calibration", "none"]) == 0
    data = json.loads(out.read_text())
    assert [each["variant"] for each in data["subjects"]] == ["32 bits", "8 bits", "6 bits"]
    assert data["text"] == "1 stories of text" and data["subjects"][0]["tasks"] == {}
    for bits in (32, 8):
        export_checkpoint(checkpoint, tmp_path / str(bits), ExportConfig(bits=bits, calibration="none"))
    needs_the_kernel()
    assert main([*line, "-m", str(tmp_path / "8"), "--reference", str(tmp_path / "32"), "--kv", "int8"]) == 0
    again = json.loads(out.read_text())
    assert [each["variant"] for each in again["subjects"]] == ["32", "8", "8, int8 cache"]
    assert again["subjects"][1]["divergence"] == pytest.approx(data["subjects"][1]["divergence"], rel=0.2)


@each_row(
    ("wrong", "says"),
    [
        (["--checkpoint", ".", "--bits", "9"], "'9'"),
        (["--checkpoint", ".", "--sizes", "much"], "much"),
        (["--kv", "int3"], "int3"),
        (["--pieces", "0"], "at least one piece"),
        (["--reference", "x"], "-m"),
        (["--text", "none"], "none"),
        (["--data", "none"], "none"),
    ],
)
def test_bad_input_is_one_line(wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", *wrong]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1
