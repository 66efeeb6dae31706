"""GGUF models as a caller meets them: the same calls, plans, speculation and sessions as bundles of our own graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.geometry import LLAMA_KV
from edgeinfer.core.errors import BudgetError, CapabilityError, ModelError
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.options import ExportConfig
from tests.cache import export_checkpoint
from tests.gguf_models import builtin_checkpoint, builtin_gguf, random_gguf
from tests.runtime.backends.llamacpp.models import Shape, write_gguf
from tests.speculation import BUILTIN, PROMPT, check_figures, load_eager, needs_builtin, plain, same

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
pytestmark = [needs_builtin, pytest.mark.gguf]

WHO = ("auto", "copy", "ngram", "recycle", "copy,ngram,recycle", "model")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11},
    "penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
}
PROMPTS = (PROMPT, "Tom and Lily went to the park. Tom and Lily", "The end.")


@pytest.fixture(scope="module")
def tales() -> Iterator[edgeinfer.Model]:
    """The built-in model from a GGUF file, with itself as its draft model.

    With weights of 8 bits and a cache in q8_0 llama.cpp's rows do not depend on the size of a pass, so that what is
    drawn at random cannot either.
    """
    path = builtin_gguf("Q8_0")
    with load_eager(path, backend="llamacpp", context=256, kv="q8_0", draft_model=str(path)) as model:
        yield model


@pytest.fixture(scope="module")
def floats() -> Iterator[edgeinfer.Model]:
    """The model in half precision, as llama.cpp runs it by default."""
    with load_eager(builtin_gguf(), backend="llamacpp", context=256, draft_model=str(builtin_gguf())) as model:
        yield model


def llama_greedy(path: Path, prompt: list[int], tokens: int, context: int) -> list[int]:
    """llama.cpp's own plain decoding, by llama-cpp-python's high-level class."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_ctx=context, n_threads=1, n_threads_batch=1, verbose=False)
    try:
        found: list[int] = []
        for token in model.generate(prompt, temp=0.0):
            found.append(token)
            if len(found) == tokens:
                break
        return found
    finally:
        model.close()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("way", WAYS)
def test_text_is_that_of_plain_decoding(tales: edgeinfer.Model, who: str, way: str) -> None:
    for prompt in PROMPTS:
        for width in (1, 3):
            options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "draft_width": width}
            found = same(tales, who, prompt=prompt, **options, **WAYS[way])
            assert (found.mode, found.lossless, found.verification) == (who, True, "keyed")


@pytest.mark.parametrize("who", ["off", "auto", "model", "copy,ngram,recycle"])
def test_text_is_that_of_llama_cpp_itself(floats: edgeinfer.Model, who: str) -> None:
    for prompt in PROMPTS:
        ids = floats.tokenize(prompt)
        mine = floats.generate(ids, max_tokens=60, ignore_eos=True, speculation=who).token_ids
        assert list(mine) == llama_greedy(builtin_gguf(), ids, 60, 256)


def test_a_small_model_drafts_well_for_itself(tales: edgeinfer.Model) -> None:
    found = same(tales, "model", max_tokens=60, ignore_eos=True)
    assert found.acceptance_rate > 0.9


@pytest.mark.parametrize("drafter", ["gguf", "bundle"])
@pytest.mark.parametrize("target", ["gguf", "bundle"])
def test_draft_models_of_either_format_serve_targets_of_either(target: str, drafter: str) -> None:
    paths = {"gguf": builtin_gguf(), "bundle": BUILTIN}
    with load_eager(paths[target], context=128, draft_model=str(paths[drafter]), speculation="model") as model:
        assert same(model, "model", max_tokens=40, ignore_eos=True).acceptance_rate > 0.8


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="different vocabulary"):
        edgeinfer.load(builtin_gguf(), backend="llamacpp", draft_model=str(random_gguf(tmp_path)))


def test_its_text_is_that_of_the_onnx_bundle(tmp_path: Path) -> None:
    bundle = export_checkpoint(builtin_checkpoint(), tmp_path / "onnx", ExportConfig(bits=32))
    options: dict[str, Any] = {"context": 128, "speculation": "off", "threads": 1}
    with (
        edgeinfer.load(bundle, **options) as onnx,
        edgeinfer.load(builtin_gguf("F32"), backend="llamacpp", kv="float32", **options) as gguf,
    ):
        for prompt in PROMPTS:
            ids = onnx.tokenize(prompt)
            assert ids == gguf.tokenize(prompt)
            rows = [np.concatenate([row.copy() for row in model.logits(ids)]) for model in (onnx, gguf)]
            np.testing.assert_allclose(rows[0], rows[1], atol=1e-3)
            assert onnx.generate(prompt, max_tokens=40).text == gguf.generate(prompt, max_tokens=40).text
        messages = [{"role": "user", "content": "Tell me a story about Tom."}]
        assert onnx.tokenize_chat(messages) == gguf.tokenize_chat(messages)
        assert onnx.chat().send("Tell me a story.").text == gguf.chat().send("Tell me a story.").text


@pytest.mark.parametrize(("kind", "weights"), [("Q4_0", "packed"), ("Q4_0", "mapped"), ("F16", "mapped")])
@pytest.mark.parametrize("kv", LLAMA_KV)
def test_every_cache_and_both_kinds_of_weights_give_the_same_text_drafted_or_not(
    kind: str, kv: str, weights: str
) -> None:
    with load_eager(builtin_gguf(kind), backend="llamacpp", context=128, kv=kv, weights=weights) as model:
        assert (model.plan.configuration.kv, model.plan.configuration.weights) == (kv, weights)
        expected = plain(model, max_tokens=40, ignore_eos=True)
        found = model.generate(PROMPT, speculation="copy,ngram,recycle", max_tokens=40, ignore_eos=True)
        assert found.speculation.lossless and found.speculation.accepted
        check_figures(found.speculation)
        assert_parts_at_a_tie(model, expected.token_ids, found.token_ids)


def assert_parts_at_a_tie(model: edgeinfer.Model, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    """llama.cpp sums one row and several in different ways, so which of two equal tokens comes is the machine's."""
    assert len(found) == len(expected)
    places = [place for place, pair in enumerate(zip(expected, found, strict=True)) if len(set(pair)) == 2]
    if places:
        *_, rows = model.logits([*model.tokenize(PROMPT), *expected[: places[0]]])
        best = np.argsort(-rows[-1])[:2]
        assert set(best.tolist()) == {expected[places[0]], found[places[0]]}
        assert rows[-1][best[0]] - rows[-1][best[1]] < 0.05


def test_a_conversation_goes_on_from_its_cache(tales: edgeinfer.Model) -> None:
    chat = tales.chat()
    chat.send("Tell me a story about Tom.", max_tokens=30)
    second = chat.send("And then?", max_tokens=10)
    assert second.timings.cached_prompt_tokens > 20


def test_sessions_are_saved_and_taken_up_again(tmp_path: Path) -> None:
    with load_eager(builtin_gguf(), backend="llamacpp", context=256, prefix_cache="4MB") as model:
        chat = model.chat()
        first = chat.send("Tell me a story about Tom.", max_tokens=30)
        chat.save(tmp_path / "talk.session")
        expected = chat.send("What did Tom see?", max_tokens=20).text
        other = model.generate("Once upon a time", max_tokens=20).text
        assert model.generate("Once upon a time", max_tokens=20).text == other
    with load_eager(builtin_gguf(), backend="llamacpp", context=256) as model:
        again = model.load_chat(tmp_path / "talk.session")
        result = again.send("What did Tom see?", max_tokens=20)
        assert result.text == expected
        assert result.timings.cached_prompt_tokens > len(first.token_ids) - 2


def test_conversations_put_aside_come_back_from_the_prefix_cache() -> None:
    with edgeinfer.load(
        builtin_gguf(), backend="llamacpp", context=256, prefix_cache="8MB", speculation="off"
    ) as model:
        long = "One day, Tim and his mom went to the big red barn to see the animals and the farmer. " * 2
        first = model.generate(long, max_tokens=10)
        model.generate("The cat sat on the mat and looked at the bird in the tree until it was dark.", max_tokens=10)
        second = model.generate(long, max_tokens=10)
        assert second.text == first.text
        assert second.timings.cached_prompt_tokens >= 30


def test_cancelling_ends_a_reply() -> None:
    with load_eager(builtin_gguf(), backend="llamacpp", context=512) as model:
        stream = model.stream("Once upon a time", ignore_eos=True)
        next(stream)
        stream.cancel()
        list(stream)
        assert stream.result.finish_reason == "cancelled"
        assert model.generate("Once", max_tokens=5).finish_reason in ("length", "stop")


def test_replies_are_searched_for_in_texts_that_take_turns(tales: edgeinfer.Model) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 7}
    samples = tales.generate(PROMPT, search="samples", samples=3, **asked)
    alone = [
        tales.generate(PROMPT, **asked | {"seed": 7 + index, "speculation": "off"}).token_ids for index in range(3)
    ]
    assert samples.search is not None and [text.token_ids for text in samples.search.texts] == alone
    beam = tales.generate(PROMPT, search="beam", max_tokens=12).search
    assert beam is not None and beam.texts[0].score >= max(text.score for text in beam.texts)
    # What is behind the reply is what an empty cache gives.
    text = [*tales.tokenize(PROMPT), *samples.token_ids, 9]
    behind = tales.generate(text, max_tokens=6).token_ids
    tales.score([5, 6])
    assert tales.generate(text, max_tokens=6).token_ids == behind


def test_models_with_sliding_windows_draft_search_and_come_back(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "windows.gguf", Shape(window=8, head_dim=64))
    with load_eager(path, backend="llamacpp", context=128) as model:
        ids = [5 + i % 9 for i in range(40)]
        same(model, "copy,ngram", prompt=ids, max_tokens=20, ignore_eos=True)
        model.generate([7, 8, 9], max_tokens=4)  # another conversation
        expected = model.generate(ids, max_tokens=8, ignore_eos=True).token_ids
        model.unload()
        assert model.generate(ids, max_tokens=8, ignore_eos=True).token_ids == expected
        assert model.generate(ids, search="beam", beams=1, max_tokens=8, ignore_eos=True).token_ids == expected
        model.generate(ids, max_tokens=8, ignore_eos=True)
        model.save_session(tmp_path / "talk.session")
    with edgeinfer.load(path, backend="llamacpp", context=128, prefix_cache="1MB") as model:
        assert model.load_session(tmp_path / "talk.session") == [*ids, *expected[:-1]]
        assert model.generate(ids, max_tokens=8, ignore_eos=True).token_ids == expected


def test_layers_cannot_be_skipped_and_the_error_names_the_way() -> None:
    with pytest.raises(CapabilityError) as raised:
        edgeinfer.load(builtin_gguf(), backend="llamacpp", context=64, speculation="exit")
    assert "natively exported bundle" in str(raised.value)


def test_a_plan_fits_or_says_the_least_that_would_do() -> None:
    with pytest.raises(BudgetError) as raised:
        edgeinfer.load(builtin_gguf(), backend="llamacpp", memory="40MB")
    assert raised.value.minimum_bytes is not None and raised.value.terms["kv"] > 0
    plan = edgeinfer.plan(builtin_gguf(), backend="llamacpp", memory="2GB", context=128)
    assert plan.fits and {"kv", "activations", "weights_packed", "weights_mapped", "tokenizer"} <= set(plan.terms)


def test_experts_can_be_fewer_for_a_drafter_of_the_same_file(tmp_path: Path) -> None:
    path = random_gguf(tmp_path, "qwen3-moe")
    with load_eager(path, context=64, draft_model=str(path), draft_experts=1, speculation="model") as model:
        found = same(model, "model", prompt=[5, 6, 7], max_tokens=20, ignore_eos=True)
        assert 0 < found.acceptance_rate < 1


def test_a_copy_without_some_layers_drafts_for_the_whole(tmp_path: Path) -> None:
    pruned = tmp_path / "drafter.gguf"
    quantize_gguf(builtin_gguf(), pruned, "COPY", prune_layers=(2,))
    with load_eager(
        builtin_gguf(), backend="llamacpp", context=128, draft_model=str(pruned), speculation="model"
    ) as model:
        assert same(model, "model", max_tokens=40, ignore_eos=True).acceptance_rate > 0.4


def test_choices_are_kept_to(tales: edgeinfer.Model) -> None:
    assert tales.generate("The answer is", choices=("yes", "no")).text in ("yes", "no")


def test_a_gguf_model_is_evaluated_beside_its_bundle() -> None:
    text = "Once upon a time there was a little dog. The little dog had a red ball and played with it all day long."
    found = edgeinfer.evaluate(builtin_gguf("Q8_0"), [text], backend="llamacpp", reference=BUILTIN)
    assert found.divergence is not None and found.divergence.mean < 0.05


def test_a_command_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    from edgeinfer.apps.cli.main import main

    engine = ["-m", str(builtin_gguf()), "--backend", "llamacpp"]
    assert main(["run", *engine, "-p", "Once upon a time", "-n", "5", "-c", "64", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["plan", *engine, "--memory", "2GB"]) == 0
