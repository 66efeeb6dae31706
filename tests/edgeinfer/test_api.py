"""Loading, planning and asking; one reply as a stream: its chunks, its end, leaving it, and what its result says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import hub
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.errors import (
    BackendError,
    BudgetError,
    ContextLengthError,
    EdgeInferError,
    ModelError,
    PromptError,
    TemplateError,
    UsageError,
)
from tests.cli import python
from tests.speculation import load_eager, random_bundle
from tests.tables import each_row
from tests.waiting import in_thread

PROMPT = "Once upon a time there was a little dog."


def test_a_result_as_json(model: edgeinfer.Model) -> None:
    result = model.generate(PROMPT, max_tokens=6, ignore_eos=True)
    data = json.loads(json.dumps(result.to_dict()))
    assert data == result.to_dict()
    assert data["token_ids"] == list(result.token_ids)
    assert data["usage"]["total_tokens"] == data["usage"]["prompt_tokens"] + 6
    assert data["model"]["architecture"] == "LlamaForCausalLM"
    assert data["model"]["backend"] == "onnx"
    assert data["memory"]["planned_bytes"] == sum(data["memory"]["terms"].values()) == model.plan.planned_bytes
    assert data["speculation"]["mode"] == "auto" and data["speculation"]["lossless"] is True


def test_a_plan_as_json(small_bundle: Path) -> None:
    plan = edgeinfer.plan(small_bundle, memory="2GB", context=100, prefill_chunk=16)
    data = json.loads(json.dumps(plan.to_dict()))
    fields = {"fits", "budget_bytes", "minimum_bytes", "planned_bytes", "terms", "choice", "alternatives"}
    fields |= {"speculation_bytes", "best_speed_bytes", "curve"}
    assert set(data) == fields | {"counted", "anonymous_bytes", "speed", "given_up", "not_chosen", "device"}
    assert (data["fits"], data["budget_bytes"]) == (True, 2 * 10**9)
    assert data["planned_bytes"] == sum(data["terms"].values())
    assert (data["choice"]["context"], data["choice"]["prefill_chunk"]) == (100, 16)


def test_options_reach_the_model(small_bundle: Path) -> None:
    with load_eager(small_bundle, memory="2GB", context=77, threads=2, prefill_chunk=5, exact=False) as model:
        assert model.threads == 2
        assert (model.context, model.plan.prefill_chunk, model.plan.budget_bytes) == (77, 5, 2 * 10**9)
        assert model.generate(PROMPT, max_tokens=3).memory.budget_bytes == 2 * 10**9


def test_the_context_defaults_to_what_the_model_allows(model: edgeinfer.Model) -> None:
    assert model.context == 512
    assert model.info.name == "small" and repr(model).startswith("<Model small: ")


def test_a_context_larger_than_the_model_allows(small_bundle: Path) -> None:
    for act in (edgeinfer.load, edgeinfer.plan):
        with pytest.raises(ContextLengthError, match=r"513.*512") as caught:
            act(small_bundle, context=513)
        assert "512" in caught.value.hint


def test_a_budget_too_small_says_where_it_goes(small_bundle: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        edgeinfer.load(small_bundle, memory="1MB")
    error = caught.value
    assert error.exit_code == 4
    assert {"kv", "activations"} <= set(error.terms)
    assert error.minimum_bytes >= sum(error.terms.values()) * 0.5
    assert "1.0 MB" in error.message
    assert edgeinfer.plan(small_bundle, memory="1MB").fits is False


RUN = """
import json, sys
import edgeinfer
memory = None
if sys.argv[2] == "tight":
    try:
        edgeinfer.load(sys.argv[1], memory="1MB")
    except edgeinfer.EdgeInferError as error:
        memory = error.minimum_bytes
model = edgeinfer.load(sys.argv[1], memory=memory)
model.generate("Once upon a time " * 20, max_tokens=60, ignore_eos=True)
print(json.dumps(model.generate("There was a little dog " * 30, max_tokens=100, ignore_eos=True).to_dict()["memory"]))
"""


@each_row("budget", ["none", "tight"])
def test_a_fresh_process_stays_within_its_plan(small_bundle: Path, budget: str) -> None:
    """Its own minimum is a budget that loads, and that it keeps."""
    memory = json.loads(python(RUN, small_bundle, budget))
    assert memory["peak_rss_bytes"] <= memory["planned_bytes"]
    assert memory["budget_bytes"] is None or memory["planned_bytes"] <= memory["budget_bytes"]
    assert memory["anonymous_bytes"] + memory["file_bytes"] <= memory["peak_rss_bytes"]


def test_a_prompt_longer_than_the_context(model: edgeinfer.Model) -> None:
    with pytest.raises(ContextLengthError, match="513"):
        model.stream([5] * 513)
    assert model.generate([5] * 512).finish_reason == "length"


def test_scores_are_log_probabilities(model: edgeinfer.Model) -> None:
    ids = model.tokenize(PROMPT * 3)
    scores = model.score(ids)
    assert scores.logprobs.shape == (len(ids) - 1,) and scores.best.shape == (len(ids),)
    assert (scores.logprobs < 0).all()
    assert scores.perplexity == pytest.approx(float(np.exp(-scores.logprobs.mean())))
    assert int(scores.best[-1]) == model.generate(ids, max_tokens=1, ignore_eos=True).token_ids[0]
    for count in (0, 1, 513):
        with pytest.raises(UsageError):
            model.score([5] * count)


def test_measuring(model: edgeinfer.Model) -> None:
    times = edgeinfer.tools.measure_passes(model, [1, 3], past=9, repeats=2)
    assert set(times) == {1, 3} and all(len(t) == 2 and min(t) > 0 for t in times.values())
    decode = edgeinfer.tools.measure_decode(model, 5, past=9)
    assert len(decode) == 5 and min(decode) > 0
    prefill = edgeinfer.tools.measure_prefill(model, 100, repeats=2)
    assert len(prefill) == 2 and min(prefill) > 0
    assert model.generate([7, 8, 9], max_tokens=1).timings.cached_prompt_tokens == 0
    with pytest.raises(UsageError, match="context"):
        edgeinfer.tools.measure_passes(model, [8], past=510, repeats=1)
    with pytest.raises(UsageError, match="context"):
        edgeinfer.tools.measure_prefill(model, 513, repeats=1)


def test_logits_come_a_few_rows_at_a_time(model: edgeinfer.Model) -> None:
    ids = model.tokenize(PROMPT * 3)
    chunks = [chunk.copy() for chunk in model.logits(ids)]
    logits = np.concatenate(chunks)
    assert len(chunks) > 1 and len(logits) == len(ids)
    assert logits.argmax(axis=1).tolist() == model.score(ids).best.tolist()
    with pytest.raises(UsageError, match="one token"):
        model.logits([])
    with pytest.raises(UsageError, match="context"):
        model.logits([5] * 513)


def test_logits_interrupted_by_another_request_are_refused(model: edgeinfer.Model) -> None:
    rows = model.logits(model.tokenize(PROMPT * 3))
    next(rows)
    model.score([5, 6, 7])
    with pytest.raises(UsageError, match="something else"):
        next(rows)


def test_work_of_a_pass(model: edgeinfer.Model, small_bundle: Path) -> None:
    tensors = {t.name: t for t in tensors_in(open_bundle(small_bundle).manifest, model.plan.layout)}
    embed, head = tensors.pop("embed"), tensors["head"]
    assert embed.data != head.data
    matrices = sum(t.size for t in tensors.values() if len(t.shape) == 2)
    assert edgeinfer.tools.pass_work(model, 3, 2).multiply_adds == 3 * (matrices - head.size) + 2 * head.size
    # Everything is read once, however many tokens, but of the embedding only rows; the head where it has rows.
    everything = sum(t.nbytes for t in tensors.values())
    assert edgeinfer.tools.pass_work(model, 9, 1).weight_bytes == everything
    assert edgeinfer.tools.pass_work(model, 1, 0).weight_bytes == everything - head.nbytes
    plain, behind = (edgeinfer.tools.pass_work(model, 2, 1, past=past) for past in (None, 100))
    spec = open_bundle(small_bundle).manifest.decoder
    assert spec is not None
    # Two rows see 101 and 102 tokens, whose keys and values are read once.
    assert behind.multiply_adds - plain.multiply_adds == spec.num_layers * 2 * spec.q_size * (101 + 102)
    assert plain.cache_bytes == 0
    assert behind.cache_bytes == pytest.approx(102 * spec.geometry.kv_bytes_per_token(), rel=0.3)


def test_costs_of_loading(small_bundle: Path) -> None:
    with edgeinfer.load(small_bundle) as model:
        costs = model.load_costs
        assert 0 < costs.tokenizer_ms < costs.total_ms
        assert model.generate(PROMPT, max_tokens=1).timings.load_ms == costs.total_ms


def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path)
    name = open_bundle(bundle).manifest.name
    with load_eager(bundle) as model, pytest.raises(TemplateError, match=f"{name} has no chat template") as caught:
        model.chat().send("Hello")
    assert "generate" in caught.value.hint


Call = Callable[[Any], object]

# What is done with a model, the error and words of its message.
CALLS: tuple[tuple[Call, type[EdgeInferError], str], ...] = (
    (lambda model: model.generate(b"Once"), PromptError, "The prompt is b'Once'"),
    (lambda model: model.generate_batch("Once"), PromptError, "The prompts are one text, 'Once'."),
    (lambda model: model.stream("a\udce9b"), PromptError, "Unicode"),
    (lambda model: model.generate([5, -1]), UsageError, "vocabulary"),
    (lambda model: model.generate([5, 10**6]), UsageError, "vocabulary"),
    (lambda model: model.tokenize(None), PromptError, "The text is None"),
    (lambda model: model.detokenize([-1]), PromptError, "The token id -1 is outside"),
    (lambda model: model.detokenize([0, 2**31]), PromptError, f"The token id {2**31} is outside"),
    (lambda model: model.pieces([2**31]), PromptError, f"The token id {2**31} is outside"),
    (lambda model: model.detokenize("Once"), PromptError, "The ids are 'Once', which are no integers"),
    (lambda model: model.chat(system=5), UsageError, "The system message is 5"),
    (lambda model: model.generate("Once", choices=[]), UsageError, "choices=[] is out of range"),
    (lambda _: edgeinfer.load(""), ModelError, "'' is not a model's name."),
    (lambda _: edgeinfer.load(5), ModelError, "5 is not a model's name."),  # type: ignore[arg-type]
)


class FilePath:
    """What other libraries have for paths."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


@each_row("call, kind, words", CALLS)
def test_wrong_arguments_are_refused_by_name(
    model: edgeinfer.Model, call: Call, kind: type[EdgeInferError], words: str
) -> None:
    with pytest.raises(kind) as refusal:
        call(model)
    assert words in str(refusal.value)


def test_ids_of_numpy_have_a_text(model: edgeinfer.Model) -> None:
    ids = model.tokenize("the dog and the cat")
    assert model.detokenize(ids).strip() == "the dog and the cat" and model.detokenize([]) == ""
    numbers: Any = np.array(ids)
    for given in (numbers, list(numbers)):
        assert model.detokenize(given) == model.detokenize(ids)
        assert model.pieces(given) == model.pieces(ids)
    wrongs: Any = ([True], np.array([True]), np.array(3), np.array([ids]), [1.0])
    for wrong in wrongs:
        with pytest.raises(PromptError, match="The ids are"):
            model.detokenize(wrong)


@each_row("kind", (PurePath, FilePath))
def test_paths_of_any_kind_are_models(kind: Callable[[str], Any], tmp_path: Path) -> None:
    assert hub.find(kind(str(tmp_path))) == tmp_path
    with pytest.raises(ModelError, match=r"No model at '.*none'"):
        hub.find_model(kind(str(tmp_path / "none")))
    assert edgeinfer.LoadOptions.of(draft_model=kind(str(tmp_path))).draft_model == str(tmp_path)


def test_a_result_has_the_logprobs_of_its_text(model: edgeinfer.Model) -> None:
    streamed = model.stream("the dog", max_tokens=6, logprobs=2, ignore_eos=True)
    told = [each for chunk in streamed for each in chunk.logprobs]
    result = streamed.result
    assert result.logprobs == tuple(told)
    assert len(told) == 6
    assert json.loads(json.dumps(result.to_dict()))["logprobs"][0]["bytes"] == list(told[0].bytes)
    assert "logprobs" not in model.generate("the dog", max_tokens=2).to_dict()


def test_the_builtin_model_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.find(hub.BUILTIN) == hub.builtin()
    (tmp_path / hub.BUILTIN).mkdir()
    assert hub.find(hub.BUILTIN) == Path(hub.BUILTIN)


BEGINNING = "Once upon a time"
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "ignore_eos": True}


def broken(*_: Any, **__: Any) -> None:
    raise BackendError("The engine broke.")


@pytest.mark.parametrize("seed", range(5))
def test_stream_and_generate_agree(model: edgeinfer.Model, seed: int) -> None:
    options = DRAWN | {"seed": seed}
    stream = model.stream(BEGINNING, **options)
    chunks = list(stream)
    result = model.generate(BEGINNING, **options)
    assert "".join(chunk.text for chunk in chunks) == result.text == stream.result.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == result.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert model.detokenize(result.token_ids) in (result.text, result.text.strip())


def test_seeds_reproduce_and_differ(model: edgeinfer.Model) -> None:
    first, again, other = (model.generate(BEGINNING, **DRAWN | {"seed": s}).token_ids for s in (1, 1, 2))
    assert first == again != other
    options = DRAWN | {"seed": None}
    assert model.generate(BEGINNING, **options).token_ids != model.generate(BEGINNING, **options).token_ids
    assert (
        model.generate(BEGINNING, max_tokens=20).token_ids == model.generate(BEGINNING, max_tokens=20, seed=3).token_ids
    )


def test_a_stop_string_ends_the_reply_before_itself(model: edgeinfer.Model) -> None:
    whole = model.generate(BEGINNING, **DRAWN).text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    stream = model.stream(BEGINNING, stop=[stop], **DRAWN)
    streamed = "".join(chunk.text for chunk in stream)
    assert stream.result.text == streamed == whole[: whole.index(stop)]
    assert stream.result.finish_reason == "stop"


def test_a_stop_string_that_never_comes_loses_no_text(model: edgeinfer.Model) -> None:
    whole = model.generate(BEGINNING, **DRAWN)
    # The last characters begin the stop string, so they are held back until the end.
    result = model.generate(BEGINNING, stop=[whole.text[-2:] + "never"], **DRAWN)
    assert (result.text, result.finish_reason) == (whole.text, "length")


def test_stop_token_ids(model: edgeinfer.Model) -> None:
    whole = model.generate(BEGINNING, **DRAWN).token_ids
    stop = next(token for token in whole[9:] if token != whole[0])
    result = model.generate(BEGINNING, stop_token_ids=[stop], **DRAWN)
    assert result.token_ids == whole[: whole.index(stop) + 1]
    assert result.finish_reason == "stop"
    assert result.text == model.generate(BEGINNING, **DRAWN | {"max_tokens": whole.index(stop)}).text


def test_end_of_text(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "logit_bias": {1: 1000.0}}
    result = model.generate(BEGINNING, **options)
    assert (result.token_ids, result.text, result.finish_reason) == ((1,), "", "stop")
    ignored = model.generate(BEGINNING, ignore_eos=True, **options)
    assert (ignored.token_ids, ignored.finish_reason) == ((1,) * 6, "length")


def test_the_result_comes_at_the_end(model: edgeinfer.Model) -> None:
    stream = model.stream(BEGINNING, max_tokens=4, ignore_eos=True)
    next(stream)
    with pytest.raises(UsageError, match="not finished"):
        _ = stream.result
    list(stream)
    assert len(stream.result.token_ids) == 4


def test_timings(model: edgeinfer.Model) -> None:
    # Plainly: tokens of one pass come together, so that most of them may have taken no time of their own.
    timings = model.generate(BEGINNING, max_tokens=12, ignore_eos=True, speculation="off").timings
    assert timings.load_ms > 0
    assert 0 < timings.prompt_ms <= timings.ttft_ms
    assert 0 < timings.per_token_p50_ms <= timings.per_token_p95_ms
    assert timings.tokens_per_second == pytest.approx(1e3 / timings.per_token_ms)
    single = model.generate(BEGINNING, max_tokens=1).timings
    assert single.ttft_ms > 0
    assert (single.per_token_ms, single.per_token_p95_ms, single.tokens_per_second) == (0, 0, 0)


def test_cancelling_before_the_first_chunk(model: edgeinfer.Model) -> None:
    stream = model.stream(BEGINNING, **DRAWN)
    stream.cancel()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
    assert stream.result.token_ids == ()


def test_cancelling_a_finished_reply_leaves_the_next_alone(model: edgeinfer.Model) -> None:
    stream = model.stream(BEGINNING, max_tokens=3, ignore_eos=True)
    list(stream)
    stream.cancel()
    assert stream.result.finish_reason == "length"
    assert len(model.generate(BEGINNING, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_a_stream_left_early_makes_room_for_the_next(model: edgeinfer.Model) -> None:
    expected = model.generate("Another prompt", **DRAWN).text
    left = model.stream(BEGINNING, **DRAWN)
    pieces = [next(left).text for _ in range(3)]
    assert model.generate("Another prompt", **DRAWN).text == expected
    assert left.result.finish_reason == "cancelled"
    assert left.result.text == "".join(pieces)
    assert list(left) == []


def test_a_with_block_finishes_the_reply(model: edgeinfer.Model) -> None:
    with model.stream(BEGINNING, **DRAWN) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    stream.close()
    assert len(stream.result.token_ids) == 1


def test_a_reply_closed_before_its_first_chunk(model: edgeinfer.Model) -> None:
    model.generate(BEGINNING, max_tokens=1)
    model.generate(BEGINNING, max_tokens=1)  # reuses the prompt
    stream = model.stream(BEGINNING, **DRAWN)
    stream.close()
    assert (stream.result.text, stream.result.token_ids, stream.result.finish_reason) == ("", (), "cancelled")
    # Nothing was evaluated or reused for it.
    assert (stream.result.timings.prompt_ms, stream.result.timings.cached_prompt_tokens) == (0, 0)


def test_another_thread_cannot_end_a_running_reply(model: edgeinfer.Model) -> None:
    expected = model.generate(BEGINNING, **DRAWN).text
    stream = model.stream(BEGINNING, **DRAWN)
    pieces = [next(stream).text]
    (refused,) = in_thread(lambda: model.generate("Hello", max_tokens=2))
    assert isinstance(refused, UsageError)
    assert "Another thread" in refused.message
    pieces += [chunk.text for chunk in stream]
    assert "".join(pieces) == expected
    (allowed,) = in_thread(lambda: model.generate("Hello", max_tokens=2))
    assert isinstance(allowed, edgeinfer.Result)


def test_a_reply_that_failed_does_not_block_other_threads(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_eager(small_bundle) as model:
        with monkeypatch.context() as patch:
            patch.setattr(model._parts.backend, "forward", broken)
            (failed,) = in_thread(lambda: model.generate(BEGINNING, max_tokens=2))
        assert isinstance(failed, BackendError) and "broke" in failed.message
        assert len(model.generate(BEGINNING, max_tokens=2, ignore_eos=True).token_ids) == 2
