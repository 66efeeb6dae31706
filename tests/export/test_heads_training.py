"""Heads in training and in use are the same function; training makes them better, and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.bundle.additions import Heads, add_heads, read_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.training.heads import HeadsOptions, HydraOptions, MedusaOptions
from edgeinfer.export.training.models import Target, load_target
from edgeinfer.export.training.routers import RoutersOptions
from edgeinfer.export.training.text import TokenFile, write_tokens
from edgeinfer.export.training.trainer import Trainer, TrainOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.research.heads import StateDrafter
from edgeinfer.runtime.research.hydra import HydraDrafter
from edgeinfer.runtime.research.medusa import MedusaDrafter
from edgeinfer.runtime.speculation.drafters.contract import Draft, Round, Verdict
from tests.alone import Alone
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint
from tests.recorded import check_recorded
from tests.runtime.speculation.drafters.models import context
from tests.runtime.speculation.drafters.rounds import guesses_of
from tests.tables import each_row

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WINDOWS: dict[str, Any] = {"seed": 3, "rows": 4, "length": 16}
OPTIONS = TrainOptions(steps=12, learning_rate=2e-2, weight_decay=0.0, warmup=2, threads=1)
# A rule that heads can learn: every token is the one before it, plus 7 within forty.
TEXT = [(7 * place) % 40 for place in range(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    make_checkpoint(path / "target", "llama", **SIZES)
    export_checkpoint(path / "target", path / "target-bundle", ExportConfig(32))
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder / "target")


@pytest.fixture(scope="module")
def text(folder: Path) -> TokenFile:
    return write_tokens(folder / "text.u32", [np.array(TEXT)])


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder / "target-bundle")


KINDS: dict[str, HeadsOptions] = {
    each.kind: each(**WINDOWS, count=3, tokens=40) for each in (MedusaOptions, HydraOptions)
}


def train(task: Any, until: int | None = None, work: Path | None = None) -> tuple[float, ...]:
    return Trainer(task, OPTIONS, work).run(until=until).losses


def shown(hidden: Floats, committed: tuple[int, ...] = ()) -> Round:
    """The round of a pass over the root alone."""
    fed, nothing = np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
    return Round(Draft(), Verdict((), 0, True), committed, fed, nothing, hidden)


@each_row("kind", KINDS)
def test_heads_learn_what_the_target_says(target: Target, text: TokenFile, kind: str) -> None:
    task = KINDS[kind].task(target, (text,))
    losses = train(task)
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:2])
    right = list(task.figures(text).values())
    assert len(right) == 3 and all(0 <= share <= 1 for share in right)
    sizes = {name: float(np.square(array.astype(np.float64)).sum()) for name, array in task.heads({}).arrays.items()}
    check_recorded(f"heads-{kind}", {"losses": losses, "agreement": right, "squares": sizes}, rel=5e-3)


def medusa(backend: Alone[Any], heads: Heads) -> StateDrafter:
    return MedusaDrafter(backend.model, backend.cache, heads)


def hydra(backend: Alone[Any], heads: Heads) -> StateDrafter:
    return HydraDrafter(backend.model, heads)


@each_row(
    ("kind", "drafting", "tokens"),
    [("medusa", medusa, 40), ("medusa", medusa, None), ("hydra", hydra, 40)],
)
def test_heads_that_draft_are_those_that_were_trained(
    target: Target,
    text: TokenFile,
    bundle: Bundle,
    kind: str,
    drafting: Callable[[Alone[Any], Heads], StateDrafter],
    tokens: int | None,
) -> None:
    task = replace(KINDS[kind], tokens=tokens).task(target, (text,))
    train(task)
    found = read_heads(add_heads(bundle.path, task.heads({"text": "a rule"})), kind)
    assert found is not None and found.notes == {"text": "a rule"}
    backend = Alone(ReferenceBackend(bundle, 64), 64)
    guesser = drafting(backend, found)
    # The last token is one that is not guessed, and so unknown to Hydra.
    said = [*TEXT[:10], 300]
    output = backend.forward(Pass(np.array(said[:-1]), np.arange(10), np.array([9])))
    assert output.hidden is not None
    guesser.begin(said)
    now, drafted = context(said), [5, 12]
    assert not guesses_of(guesser, now, [], 1)
    guesser.observe(shown(output.hidden[-1:]))
    with torch.no_grad():
        following = torch.tensor([[*said[1:], *drafted]])
        states, _ = task._states(torch.tensor([said[:-1]]))
        for head in range(3):
            guessed = task._guess(head, states[:, -1:], following[:, 9:])[0, 0]
            logits = run_alone(guesser._logits(now, drafted[:head]))
            assert logits is not None
            expected = (guessed @ task._rows.T).numpy()
            np.testing.assert_allclose(logits[task._tokens.numpy()], expected, rtol=2e-2, atol=5e-3)
            assert np.isneginf(np.delete(logits, task._tokens.numpy())).all()
    assert not guesses_of(guesser, now, [5, 12, 19], 1)
    assert backend.cache.length == 10


def test_routers_keep_the_wanted_share_and_say_what_it_costs(target: Target, text: TokenFile) -> None:
    task = RoutersOptions(**WINDOWS, keep=0.5).task(target, (text,))
    whole, kept = task.figures(text).values()
    assert kept == 1 and whole == pytest.approx(0, abs=1e-5)
    options = TrainOptions(steps=40, learning_rate=0.2, weight_decay=0.0, warmup=2, threads=1)
    Trainer(task, options).run()
    lost, share = task.figures(text).values()
    assert share <= 0.75 and lost > 0
    check_recorded("heads-routers", {"lost": lost, "share": share}, rel=2e-2)
    task.heads({}).check(_geometry(target))


def _geometry(target: Target) -> Any:
    return open_bundle(target.folder.parent / "target-bundle").manifest.geometry


def test_routers_gate_as_their_file_says(target: Target, text: TokenFile) -> None:
    """The mean over the prompt of the states that enter a layer, and a sigmoid."""
    task = RoutersOptions(**WINDOWS).task(target, (text,))
    with torch.no_grad():
        task._weight.copy_(torch.randn(task._weight.shape, generator=torch.Generator().manual_seed(1)))
        batch = torch.tensor([TEXT[:16]])
        _, soft, hard, _ = task.run(batch)
        entering = target.model.model(batch, output_hidden_states=True).hidden_states
    arrays = task.heads({}).arrays
    for layer in range(2):
        mean = entering[layer][0, :8].mean(0).numpy()
        score = mean @ arrays["weight"][layer] + arrays["bias"][layer]
        assert float(soft[0, layer]) == pytest.approx(1 / (1 + np.exp(-score)), rel=1e-4)
        assert float(hard[0, layer]) == pytest.approx(float(score > 0), abs=1e-6)


def test_what_cannot_be_trained_is_refused(target: Target, text: TokenFile, folder: Path) -> None:
    short = write_tokens(folder / "short.u32", [np.arange(8)])
    for make in (
        lambda: KINDS["medusa"].task(target, (short,)),
        lambda: RoutersOptions(**WINDOWS).task(target, (short,)),
        lambda: MedusaOptions(length=8, count=7).task(target, (text,)),
        lambda: MedusaOptions(count=0),
        lambda: MedusaOptions(tokens=0),
        lambda: RoutersOptions(keep=0.0),
    ):
        with pytest.raises(UsageError):
            make()
