"""Two threads that use one model at once: what each does works, or is refused with advice, and the model goes on."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import EdgeInferError, UsageError
from tests.speculation import known_costs
from tests.waiting import TIME_LIMIT, wait_until

PROMPT = "Tell me about the little dog"
OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}

Use = Callable[[edgeinfer.Model, Path], object]
# Those that run the model, and those that only look at it or free it.
RUNS: dict[str, Use] = {
    "stream": lambda model, _: [chunk.text for chunk in model.stream(PROMPT, **OPTIONS)],
    "generate": lambda model, _: model.generate(PROMPT, temperature=1.0, seed=3, **OPTIONS),
    "send": lambda model, _: model.chat().send(PROMPT, **OPTIONS),
    "schema": lambda model, _: model.generate(PROMPT, json_schema={"enum": [1, 2]}, max_tokens=8),
    "tune": lambda model, _: edgeinfer.tools.tune_drafting(model, [PROMPT], evaluations=2),
    "score": lambda model, _: model.score([5, 6, 7]),
    "logits": lambda model, _: [len(rows) for rows in model.logits([5, 6, 7])],
}
LOOKS: dict[str, Use] = {
    "close": lambda model, _: model.close(),
    "unload": lambda model, _: model.unload(),
    "save": lambda model, folder: model.save_session(folder / "talk.session"),
    "chat": lambda model, folder: model.chat().save(folder / "chat.session"),
    "load": lambda model, folder: model.load_session(folder / "kept.session"),
    "tokenize": lambda model, _: model.detokenize(model.tokenize(PROMPT)),
    "plan": lambda model, _: (model.plan.terms, model.info, model.threads, model.load_costs),
    "experts": lambda model, _: model.experts,
    "drafting": lambda model, _: edgeinfer.tools.restore_drafting(model, edgeinfer.tools.drafting_state(model)),
}
USES = RUNS | LOOKS


@pytest.fixture(autouse=True)
def costs() -> Iterator[None]:
    with known_costs():
        yield


@pytest.fixture
def folder(loaded: edgeinfer.Model, tmp_path: Path) -> Path:
    loaded.generate(PROMPT, **OPTIONS)
    loaded.save_session(tmp_path / "kept.session")
    return tmp_path


class Models:
    """A model that is loaded again once it was closed."""

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self._model: edgeinfer.Model | None = None

    def open(self) -> edgeinfer.Model:
        if self._model is None or self._model._lifecycle._closed:
            self._model = edgeinfer.load(self._bundle, threads=1)
        return self._model

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


@pytest.fixture
def models(small_bundle: Path) -> Iterator[Models]:
    found = Models(small_bundle)
    yield found
    found.close()


def outcome(use: Use, model: edgeinfer.Model, folder: Path, said: list[object]) -> None:
    try:
        use(model, folder)
        said.append(None)
    except BaseException as error:
        said.append(error)


def check(said: list[object], what: str) -> None:
    assert len(said) == 1, f"{what}: it never ended"
    error = said[0]
    assert error is None or (isinstance(error, EdgeInferError) and error.hint), f"{what}: {error!r}"


def expected(model: edgeinfer.Model) -> str:
    return model.generate(PROMPT, **OPTIONS).text


def _waits_or_is_done(thread: threading.Thread, model: edgeinfer.Model) -> bool:
    return not thread.is_alive() or model._lifecycle._closed


class Held:
    """A pass of a model that waits for `go_on`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *batch: Any, **how: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(TIME_LIMIT)
        return self._forward(*batch, **how)


def started(use: Use, model: edgeinfer.Model, folder: Path) -> tuple[threading.Thread, list[object]]:
    said: list[object] = []
    thread = threading.Thread(target=outcome, args=(use, model, folder, said), daemon=True)
    thread.start()
    return thread, said


@pytest.mark.parametrize("first", RUNS)
def test_whatever_comes_while_the_model_runs(models: Models, folder: Path, first: str) -> None:
    text = expected(models.open())
    for second in USES:
        model = models.open()
        model._parts.engine.forget()
        backend = model._parts.engine.backend
        held = Held(backend.forward)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "forward", held)
            running, of_running = started(USES[first], model, folder)
            assert held.begun.wait(TIME_LIMIT), first
            other, of_other = started(USES[second], model, folder)
            # Who closes the model waits for the pass.
            wait_until(partial(_waits_or_is_done, other, model), second)
            held.go_on.set()
            running.join(TIME_LIMIT)
            other.join(TIME_LIMIT)
        check(of_running, f"{first}, with {second}")
        check(of_other, f"{second}, during {first}")
        if second in RUNS:
            assert isinstance(of_other[0], UsageError), (first, second)
        if second == "close":
            assert model._lifecycle._parts is None, first
        else:
            assert of_running[0] is None, (first, second)
            assert expected(model) == text, (first, second)


def test_pairs_at_the_same_time(models: Models, folder: Path) -> None:
    text = expected(models.open())
    draw = random.Random(20)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(40):
            model, pair = models.open(), draw.choices(list(USES), k=2)
            together = [started(USES[name], model, folder) for name in pair]
            for (thread, said), name in zip(together, pair, strict=True):
                thread.join(TIME_LIMIT)
                check(said, f"{name} of {pair}")
            if "close" not in pair:
                assert expected(model) == text, pair
    finally:
        sys.setswitchinterval(interval)
