"""Damaged weights and hostile templates: no text comes of the first, and the model goes on after the second."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer import loading
from edgeinfer.bundle.layouts import MODEL, WEIGHTS
from edgeinfer.bundle.opening import nest_drafter, open_bundle
from edgeinfer.bundle.writing import hash_file, seal
from edgeinfer.core.errors import BundleError, ModelError, TemplateError
from edgeinfer.export.source.checkpoint import checkpoint_tensors
from edgeinfer.runtime.text import render_process
from edgeinfer.runtime.weights import verification
from edgeinfer.runtime.weights.verification import Verification
from tests.cache import made
from tests.cli import TIME_LIMIT
from tests.gguf_builder import STRING, small_model
from tests.gguf_models import random_gguf
from tests.heads import with_heads
from tests.runtime.text.test_render_process import EXAMPLES, HOSTILE, hurry
from tests.speculation import random_bundle

PROMPT = "abcabcabc"
Fault = Callable[[bytes, random.Random], bytes]


def flip(data: bytes, rng: random.Random) -> bytes:
    """One bit."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def blank(data: bytes, rng: random.Random) -> bytes:
    """A sixteenth, or as much of it as there is behind a byte that is not zero."""
    at = rng.choice([i for i in range(0, len(data), max(1, len(data) // 997)) if data[i]] or [0])
    return data[:at] + bytes(len(data[at : at + len(data) // 16 + 1])) + data[at + len(data) // 16 + 1 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    """The end is missing."""
    return data[: rng.randrange(len(data) // 2, max(len(data) - 64, len(data) // 2 + 1))]


def swap(data: bytes, rng: random.Random) -> bytes:
    """Two blocks in each other's place; where they are the same, one bit."""
    size = max(1, len(data) // 8)
    one, two = sorted((rng.randrange(0, 3) * size, rng.randrange(4, 7) * size))
    first, second = data[one : one + size], data[two : two + size]
    changed = data[:one] + second + data[one + size : two] + first + data[two + size :]
    return changed if changed != data else flip(data, rng)


def append(data: bytes, rng: random.Random) -> bytes:
    """Bytes behind the end."""
    return data + rng.randbytes(rng.randrange(1, 5000))


FAULTS: tuple[Fault, ...] = (flip, blank, cut, swap, append)


def damaged_copy(bundle: Path, folder: Path, name: str, data: bytes) -> Path:
    """A bundle of links to another one's files, but for one."""
    for path in bundle.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(bundle)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target != folder / name:
                os.link(path, target)
    (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def rich_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with heads and a drafter inside."""
    folder = tmp_path_factory.mktemp("rich")
    plain, drafter = random_bundle(folder / "plain"), random_bundle(folder / "small", num_hidden_layers=1)
    headed = with_heads(plain, folder / "headed", "medusa", "routers")
    return nest_drafter(headed, drafter, folder / "rich").path


def faults(bundle: Path, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Damaged contents of a bundle's files, weights most often."""
    rng = random.Random(seed)
    files = sorted(open_bundle(bundle).manifest.files)
    often = [WEIGHTS, MODEL, f"drafter/{WEIGHTS}", f"drafter/{MODEL}"]
    contents = {name: (bundle / name).read_bytes() for name in files}
    for index in range(count):
        name = often[index // 10 % len(often)] if index % 2 else rng.choice(files)
        yield name, FAULTS[index % len(FAULTS)](contents[name], rng)


def test_every_fault_is_found(rich_bundle: Path, tmp_path: Path) -> None:
    """Whatever would run the model."""
    for index, (name, data) in enumerate(faults(rich_bundle, 1, 100)):
        copy = damaged_copy(rich_bundle, tmp_path / str(index), name, data)
        with pytest.raises(BundleError, match=Path(name).name):
            Verification([open_bundle(copy)]).require()
        shutil.rmtree(copy)
    Verification([open_bundle(rich_bundle)]).require()


@pytest.mark.slow
def test_no_fault_gives_text(rich_bundle: Path, tmp_path: Path) -> None:
    given: list[str] = []
    for index, (name, data) in enumerate(faults(rich_bundle, 2, 100)):
        copy = damaged_copy(rich_bundle, tmp_path / str(index), name, data)
        with pytest.raises(ModelError), edgeinfer.load(copy, threads=1, remember=False, speculation="off") as model:
            given += [chunk.text for chunk in model.stream(PROMPT, max_tokens=2)]
        shutil.rmtree(copy)
    assert given == []


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that large weights are not verified before; those of small models are large."""
    event = threading.Event()

    def hash_late(path: Path, stopped: Callable[[], bool]) -> object:
        if path.name == WEIGHTS:
            assert event.wait(TIME_LIMIT)
        return hash_file(path, stopped)

    monkeypatch.setattr(verification, "SMALL_BYTES", 1000)
    monkeypatch.setattr(verification, "hash_file", hash_late)
    return event


def test_large_weights_are_awaited_by_the_first_token(small_bundle: Path, tmp_path: Path, go: threading.Event) -> None:
    """Loading continues meanwhile; no text comes before the verdict, and every request is refused after it."""
    data = flip((small_bundle / WEIGHTS).read_bytes(), random.Random(3))
    copy = damaged_copy(small_bundle, tmp_path / "copy", WEIGHTS, data)
    with edgeinfer.load(copy, threads=1, speculation="off") as model:
        assert model.info.verified == "pending"
        stream = model.stream(PROMPT, max_tokens=4, ignore_eos=True)
        assert stream.prepare(1000)
        go.set()
        with pytest.raises(BundleError, match=r"weights\.bin does not match its sha256"):
            next(stream)
        for ask in (lambda: model.generate(PROMPT), lambda: model.score([1, 2, 3]), lambda: next(model.logits([1, 2]))):
            with pytest.raises(BundleError, match=r"weights\.bin does not match"):
                ask()
        with pytest.raises(BundleError, match=r"weights\.bin does not match"):
            model.save_session(tmp_path / "session")
        assert not (tmp_path / "session").exists()
        assert model.info.verified == "failed"


def test_a_reply_that_awaits_the_verdict_can_be_cancelled(
    small_bundle: Path, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    with edgeinfer.load(small_bundle, threads=1, speculation="off") as model:
        stream = model.stream(PROMPT, max_tokens=4, ignore_eos=True)
        assert stream.prepare(1000)
        await_verdict = model._parts.verification.await_verdict

        def await_and_tell(cancelled: Callable[[], bool]) -> float | None:
            asked.set()
            return await_verdict(cancelled)

        def cancel() -> None:
            assert asked.wait(TIME_LIMIT)
            stream.cancel()

        monkeypatch.setattr(model._parts.verification, "await_verdict", await_and_tell)
        canceller = threading.Thread(target=cancel)
        canceller.start()
        result = stream.complete()
        canceller.join(TIME_LIMIT)
        assert (result.text, result.token_ids, result.finish_reason) == ("", (), "cancelled")
        assert result.model.verified == "pending"
        go.set()
        assert model.generate(PROMPT, max_tokens=4, ignore_eos=True).model.verified in ("now", "before")


def test_what_changes_while_the_model_is_away_is_found(small_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(small_bundle, tmp_path / "copy"))
    whole = (copy / WEIGHTS).read_bytes()
    with edgeinfer.load(copy, threads=1, speculation="off") as model:
        text = model.generate(PROMPT, max_tokens=4, ignore_eos=True).text
        for fault in FAULTS:
            model.unload()
            (copy / WEIGHTS).write_bytes(fault(whole, random.Random(4)))
            with pytest.raises(BundleError, match=r"weights\.bin"):
                model.generate(PROMPT, max_tokens=4)
        (copy / WEIGHTS).write_bytes(whole)
        result = model.generate(PROMPT, max_tokens=4, ignore_eos=True)
        assert (result.text, result.model.verified) == (text, "now")


def test_a_file_that_is_replaced_while_it_is_loaded_is_found(
    small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one file could be verified and another one run."""
    copy = Path(shutil.copytree(small_bundle, tmp_path / "copy"))
    make_parts = loading._make_parts

    def make(*arguments: Any) -> object:
        shutil.copy(copy / WEIGHTS, tmp_path / "other")
        (tmp_path / "other").rename(copy / WEIGHTS)
        return make_parts(*arguments)

    monkeypatch.setattr("edgeinfer.loading._make_parts", make)
    with pytest.raises(BundleError, match="was changed while it was loaded"):
        edgeinfer.load(copy, threads=1)


def test_damage_is_not_copied_under_a_new_digest(small_bundle: Path, tmp_path: Path) -> None:
    data = flip((small_bundle / WEIGHTS).read_bytes(), random.Random(5))
    copy = damaged_copy(small_bundle, tmp_path / "copy", WEIGHTS, data)
    for target, drafter in ((copy, small_bundle), (small_bundle, copy)):
        with pytest.raises(BundleError, match=r"weights\.bin does not match its sha256"):
            nest_drafter(target, drafter, tmp_path / "out")
    with pytest.raises(BundleError, match=r"weights\.bin does not match its sha256"):
        next(checkpoint_tensors(open_bundle(copy)))


def make_gguf(folder: Path) -> None:
    small_model().write(folder / "model.gguf")


def test_a_plain_gguf_file_stays_what_it_was_at_first_use(tmp_path: Path) -> None:
    """What is behind its tensors counts too; another file of another size is a new one."""
    path = Path(shutil.copy(made(make_gguf) / "model.gguf", tmp_path / "model.gguf"))
    whole, rng = path.read_bytes(), random.Random(6)
    first = Verification([open_bundle(path)])
    first.require()
    assert first.outcome == "first"
    found = 0
    for index in range(60):
        path.write_bytes(FAULTS[index % len(FAULTS)](whole, rng))
        try:
            bundle = open_bundle(path)
        except BundleError:
            continue  # by its header alone
        with pytest.raises(BundleError, match=r"not the file that was first used.*--accept|bytes"):
            Verification([bundle]).require()
        found += 1
    assert found > 10
    path.write_bytes(whole)
    again = Verification([open_bundle(path)])
    again.require()
    assert again.outcome == "now"
    small_model(general__name=(STRING, "A name that is as long as two others" * 3)).write(path)
    other = Verification([open_bundle(path)])
    other.require()
    assert other.outcome == "first"


@pytest.mark.slow
@pytest.mark.gguf
def test_no_fault_of_a_gguf_file_gives_text(tmp_path: Path) -> None:
    path = random_gguf(tmp_path)
    with edgeinfer.load(path, backend="llamacpp", threads=1) as model:
        assert model.generate(PROMPT, max_tokens=2).model.verified == "first"
    whole, rng, given = path.read_bytes(), random.Random(7), list[str]()
    for index in range(40):
        path.write_bytes(FAULTS[index % len(FAULTS)](whole, rng))
        with pytest.raises(ModelError), edgeinfer.load(path, backend="llamacpp", threads=1) as model:
            given += [chunk.text for chunk in model.stream(PROMPT, max_tokens=2)]
    assert given == []


def test_a_gguf_file_of_a_hub_is_held_against_its_name(tmp_path: Path) -> None:
    whole = (made(make_gguf) / "model.gguf").read_bytes()
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob = blobs / hashlib.sha256(whole).hexdigest()
    (snapshot / "model.gguf").symlink_to(blob)
    blob.write_bytes(whole)
    verdict = Verification([open_bundle(snapshot / "model.gguf")])
    verdict.require()
    assert verdict.outcome == "now"
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BundleError, match=f"published with. Remove {blob} and pull"):
        Verification([open_bundle(snapshot / "model.gguf")]).require()


def chat_of_hostile(bundle: Path, source: str) -> None:
    """Loads the bundle with another template and chats: it fails for its template, or answers."""
    manifest = open_bundle(bundle).manifest
    (bundle / "chat_template.jinja").write_bytes(source.encode("utf-8"))
    seal(bundle, manifest)
    try:
        model = edgeinfer.load(bundle, speculation="off")
    except TemplateError:  # it cannot be read
        return
    with model:
        try:
            model.chat().send("Hello", max_tokens=1)
        except edgeinfer.EdgeInferError as error:
            # What a template may build may still be no prompt for so small a model.
            assert isinstance(error, TemplateError) or "prompt" in error.message.lower(), source
        assert model.generate("Hello", max_tokens=1).text is not None


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hurry(monkeypatch)
    return shutil.copytree(small_bundle, tmp_path / "bundle")


def test_a_hostile_bundle_fails_and_its_model_goes_on(bundle: Path) -> None:
    for source in EXAMPLES[:2]:
        chat_of_hostile(bundle, source)


@pytest.mark.slow
def test_hostile_bundles_fail_and_their_models_go_on(bundle: Path) -> None:
    for source in HOSTILE[::24]:
        chat_of_hostile(bundle, source)


def test_a_closed_model_leaves_no_process(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[render_process.RenderProcess] = []
    plain = render_process.RenderProcess.ask

    def ask(process: render_process.RenderProcess, *arguments: object) -> object:
        started.append(process)
        return plain(process, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(render_process.RenderProcess, "ask", ask)
    with edgeinfer.load(bundle, speculation="off") as model:
        for end in (model.unload, model.close):
            model.chat().send("Hello", max_tokens=1)
            assert started[-1].pid is not None
            end()
            assert started[-1].pid is None
