"""Heads in training and in use are the same function; training makes them better, and goes on where it stopped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgeinfer.bundle.additions import Heads, add_heads, read_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BundleError, ModelError, UsageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.training.acceptance_head import AcceptanceHeadTask, area_under_curve
from edgeinfer.export.training.draft_heads import HeadsShape, HeadsTask, HydraTask, MedusaTask
from edgeinfer.export.training.models import Target, load_target
from edgeinfer.export.training.options import TrainOptions
from edgeinfer.export.training.prompt_tokens import PromptTask
from edgeinfer.export.training.routers import RoutersTask, SkipAdapterTask
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TokenFile, write_tokens
from edgeinfer.export.training.trainer import Trainer
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.speculation.drafters.contract import Draft, Round, Verdict
from edgeinfer.runtime.speculation.drafters.heads import StateDrafter
from edgeinfer.runtime.speculation.drafters.hydra import HydraDrafter
from edgeinfer.runtime.speculation.drafters.medusa import MedusaDrafter
from edgeinfer.runtime.speculation.drafters.model import AcceptanceJudge
from edgeinfer.runtime.speculation.drafters.prompt_tokens import PromptDrafter
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint
from tests.recorded import check_recorded
from tests.runtime.speculation.drafters.models import context, take_in
from tests.tables import each_row

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE = HeadsShape(count=3, tokens=40)
BATCHES = Batches(seed=3, rows=4, length=16)
OPTIONS = TrainOptions(steps=12, learning_rate=2e-2, weight_decay=0.0, warmup=2, threads=1)
# A rule that heads can learn: every token is the one before it, plus 7 within forty.
TEXT = [(7 * place) % 40 for place in range(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    for name, seed in (("target", 0), ("drafter", 1)):
        make_checkpoint(path / name, "llama", seed=seed, **SIZES)
        export_checkpoint(path / name, path / f"{name}-bundle", ExportConfig(32))
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder / "target")


@pytest.fixture(scope="module")
def drafter(folder: Path) -> Target:
    return load_target(folder / "drafter")


@pytest.fixture(scope="module")
def text(folder: Path) -> TokenFile:
    return write_tokens(folder / "text.u32", [np.array(TEXT)])


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder / "target-bundle")


TASKS: dict[str, Any] = {"medusa": MedusaTask, "hydra": HydraTask, "prompt": PromptTask}


def train(task: Any, until: int | None = None, work: Path | None = None) -> tuple[float, ...]:
    return Trainer(task, OPTIONS, work).run(until=until).losses


def shown(hidden: Floats, committed: tuple[int, ...] = (), probed: Floats | None = None) -> Round:
    """What a pass over the root alone would tell."""
    fed, nothing = np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
    probes = 0 if probed is None else len(probed)
    return Round(Draft(), Verdict((), 0, True), committed, fed, nothing, hidden, probes, probed)


@each_row("kind", TASKS)
def test_heads_learn_what_the_target_says(target: Target, text: TokenFile, kind: str) -> None:
    task = TASKS[kind](target, (text,), BATCHES, SHAPE)
    losses = train(task)
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:2])
    right = task.agreement(text)
    assert len(right) == SHAPE.count and all(0 <= share <= 1 for share in right)
    sizes = {name: float(np.square(array.astype(np.float64)).sum()) for name, array in task.heads({}).arrays.items()}
    check_recorded(f"heads-{kind}", {"losses": losses, "agreement": right, "squares": sizes}, rel=5e-3)


@each_row(
    ("kind", "drafting", "tokens"),
    [("medusa", MedusaDrafter, 40), ("medusa", MedusaDrafter, None), ("hydra", HydraDrafter, 40)],
)
def test_heads_that_draft_are_those_that_were_trained(
    target: Target,
    text: TokenFile,
    bundle: Bundle,
    kind: str,
    drafting: Callable[[Backend, Heads], StateDrafter],
    tokens: int | None,
) -> None:
    task: HeadsTask = TASKS[kind](target, (text,), BATCHES, HeadsShape(3, tokens))
    train(task)
    found = read_heads(add_heads(bundle.path, task.heads({"text": "a rule"})), kind)
    assert found is not None and found.notes == {"text": "a rule"}
    backend = ReferenceBackend(bundle, 64)
    guesser = drafting(backend, found)
    # The last token is one that is not guessed, and so unknown to Hydra.
    said = [*TEXT[:10], 300]
    output = backend.forward(ForwardInput(np.array(said[:-1]), np.arange(10), np.array([9])))
    assert output.hidden is not None
    guesser.begin(said)
    now, drafted = context(said), [5, 12]
    assert not guesser.guesses(now, [], 1)
    guesser.observe(shown(output.hidden[-1:]))
    with torch.no_grad():
        following = torch.tensor([[*said[1:], *drafted]])
        states, _ = task._states(torch.tensor([said[:-1]]))
        for head in range(SHAPE.count):
            guessed = task._guess(head, states[:, -1:], following[:, 9:])[0, 0]
            logits = guesser._logits(now, drafted[:head])
            assert logits is not None
            expected = (guessed @ task._rows.T).numpy()
            np.testing.assert_allclose(logits[task._tokens.numpy()], expected, rtol=2e-2, atol=5e-3)
            assert np.isneginf(np.delete(logits, task._tokens.numpy())).all()
    assert not guesser.guesses(now, [5, 12, 19], 1)
    assert backend.cache.length == 10


def test_prompt_tokens_ride_as_they_were_trained(target: Target, text: TokenFile, bundle: Bundle) -> None:
    task = PromptTask(target, (text,), BATCHES, SHAPE)
    train(task)
    found = read_heads(add_heads(bundle.path, task.heads({})), "prompt")
    assert found is not None
    backend = ReferenceBackend(bundle, 64)
    guesser = PromptDrafter(backend, found)
    take_in(backend, TEXT[:9])
    states = guesser.embed(np.array(TEXT[9:10]), (SHAPE.count,))
    assert states is not None and backend.cache.length == 9
    rows = np.arange(1 + SHAPE.count)
    fed = np.pad(np.array(TEXT[9:10]), (0, SHAPE.count))
    output = backend.forward(ForwardInput(fed, rows + 9, rows, hidden=states))
    with torch.no_grad():
        said = task._said(torch.tensor([TEXT[:12]]), torch.tensor([3, 9]))[0, 1] @ target.model.lm_head.weight.T
    np.testing.assert_allclose(output.logits[1:], said.numpy(), rtol=1e-3, atol=1e-4)
    assert output.hidden is not None
    guesser.begin(TEXT[:10])
    guesser.observe(shown(output.hidden[:1], probed=output.logits[1:]))
    now = context([*TEXT[:10], 3])
    best = said.argmax(-1).tolist()
    assert [guesser.guesses(now, best[:place], 1)[0].token for place in range(3)] == best
    assert not guesser.guesses(now, best, 1)


def test_a_judge_scores_as_it_was_trained(drafter: Target, target: Target, text: TokenFile, folder: Path) -> None:
    task = AcceptanceHeadTask(drafter, target, (text,), BATCHES)
    losses = train(task)
    assert np.mean(losses[-4:]) < np.mean(losses[:2])
    bundle = add_heads(folder / "drafter-bundle", task.heads({}))
    found = read_heads(bundle, "acceptance")
    assert found is not None
    backend = ReferenceBackend(bundle, 64)
    output = backend.forward(ForwardInput(np.array(TEXT[:12]), np.arange(12), np.arange(12)))
    assert output.hidden is not None
    states, wanted, distribution, _ = task._facts(torch.tensor([TEXT[:12]]))
    np.testing.assert_allclose(output.hidden, states, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        output.logits, torch.log(distribution) + torch.tensor(output.logits).logsumexp(-1, True), atol=1e-3
    )
    judge = AcceptanceJudge(found)
    with torch.no_grad():
        scores = task._judge(states)
    # What rejections counted for in training is taken out of the odds.
    unbiased = torch.softmax(scores + torch.tensor([0.0, np.log(6.0)]), -1)[:, 1]
    told = [judge.accepts(state) for state in output.hidden]
    np.testing.assert_allclose(told, unbiased, rtol=2e-2, atol=2e-3)
    came, biased = float(wanted.mean()), float(torch.softmax(scores, -1)[:, 1].mean())
    assert abs(np.mean(told) - came) < abs(biased - came)
    assert all(0 <= area <= 1 for area in task.curves(text))
    check_recorded("heads-judge", {"losses": losses, "curves": task.curves(text)}, rel=5e-3)


def test_the_area_under_the_curve_counts_pairs() -> None:
    scores, happened = torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([True, True, False, False])
    assert area_under_curve(scores, happened) == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert area_under_curve(scores, torch.ones(4, dtype=torch.bool)) == 0.5


def test_routers_keep_the_wanted_share_and_say_what_it_costs(target: Target, text: TokenFile) -> None:
    task = RoutersTask(target, (text,), BATCHES, keep=0.5)
    whole, kept = task.figures(text)
    assert kept == 1 and whole == pytest.approx(0, abs=1e-5)
    options = TrainOptions(steps=40, learning_rate=0.2, weight_decay=0.0, warmup=2, threads=1)
    Trainer(task, options).run()
    lost, share = task.figures(text)
    assert share <= 0.75 and lost > 0
    check_recorded("heads-routers", {"lost": lost, "share": share}, rel=2e-2)
    task.heads({}).check(_geometry(target))


def _geometry(target: Target) -> Any:
    return open_bundle(target.folder.parent / "target-bundle").manifest.geometry


def test_routers_gate_as_their_file_says(target: Target, text: TokenFile) -> None:
    """The mean over the prompt of the states that enter a layer, and a sigmoid."""
    task = RoutersTask(target, (text,), BATCHES)
    with torch.no_grad():
        task._weight.copy_(torch.randn(task._weight.shape, generator=torch.Generator().manual_seed(1)))
        batch = torch.tensor([TEXT[:16]])
        _, soft, hard, _ = task.run(batch, task.taught(batch))
        entering = target.model.model(batch, output_hidden_states=True).hidden_states
    arrays = task.heads({}).arrays
    for layer in range(2):
        mean = entering[layer][0, :8].mean(0).numpy()
        score = mean @ arrays["weight"][layer] + arrays["bias"][layer]
        assert float(soft[0, layer]) == pytest.approx(1 / (1 + np.exp(-score)), rel=1e-4)
        assert float(hard[0, layer]) == pytest.approx(float(score > 0), abs=1e-6)


@pytest.mark.slow
def test_an_adapter_makes_up_for_layers_that_routers_leave_out(target: Target, text: TokenFile, tmp_path: Path) -> None:
    """It leaves routers and weights alone, and its file says, in PEFT's layout, what the training computed with."""
    routers = RoutersTask(target, (text,), BATCHES, keep=0.5)
    with torch.no_grad():
        routers.parameters()["bias"].copy_(torch.tensor([2.0, -2.0]))
    weights = {name: value.clone() for name, value in target.model.state_dict().items()}
    lost, kept = routers.figures(text)
    adapter = SkipAdapterTask(routers, 4)
    assert routers.figures(text, adapter) == pytest.approx((lost, kept)), "it changes nothing at first"
    Trainer(adapter, TrainOptions(steps=60, learning_rate=1e-2, weight_decay=0.0, warmup=2, threads=1)).run()
    less, still = routers.figures(text, adapter)
    assert less < 0.8 * lost and still == kept == 0.5
    assert all(torch.equal(value, weights[name]) for name, value in target.model.state_dict().items())
    assert routers.parameters()["bias"].tolist() == [2.0, -2.0]
    adapter.save(tmp_path / "lora")
    batch = torch.tensor([TEXT[:16]])
    with torch.no_grad(), adapter.adapted():
        said = target.model(batch).logits[0, -1].numpy()
    merged = copy.deepcopy(target.model)
    factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    names = {name.rsplit(".lora_", 1)[0] for name in factors}
    with torch.no_grad():
        for name in names:
            first, second = (factors[f"{name}.lora_{factor}.weight"] for factor in "AB")
            merged.get_submodule(name.removeprefix("base_model.model.")).weight += 2 * second @ first
        assert len(names) == 14 and torch.allclose(merged(batch).logits[0, -1], torch.from_numpy(said), atol=1e-4)


@each_row("kind", TASKS)
def test_an_interrupted_training_ends_as_if_it_had_not_been(
    target: Target, text: TokenFile, kind: str, tmp_path: Path
) -> None:
    def task() -> Any:
        return TASKS[kind](target, (text,), BATCHES, SHAPE)

    whole = task()
    losses = train(whole)
    first, second = task(), task()
    train(first, 5, tmp_path)
    assert train(second, None, tmp_path) == losses
    assert second.heads({}).to_bytes() == whole.heads({}).to_bytes()
    with pytest.raises(UsageError, match="another configuration"):
        train(TASKS[kind](target, (text,), BATCHES, HeadsShape(2, 40)), None, tmp_path)


def test_what_cannot_be_trained_is_refused(target: Target, drafter: Target, text: TokenFile, folder: Path) -> None:
    short = write_tokens(folder / "short.u32", [np.arange(8)])
    for make in (
        lambda: MedusaTask(target, (short,), BATCHES, SHAPE),
        lambda: PromptTask(target, (short,), BATCHES, SHAPE),
        lambda: AcceptanceHeadTask(drafter, target, (short,), BATCHES),
        lambda: RoutersTask(target, (short,), BATCHES),
        lambda: MedusaTask(target, (text,), Batches(0, 1, 4), SHAPE),
        lambda: HeadsShape(count=0),
        lambda: HeadsShape(tokens=0),
        lambda: RoutersTask(target, (text,), BATCHES, keep=0.0),
    ):
        with pytest.raises(UsageError):
            make()


def test_a_judge_of_another_vocabulary_is_refused(target: Target, folder: Path, text: TokenFile) -> None:
    make_checkpoint(folder / "other", "llama", seed=2, **SIZES)
    path = folder / "other" / "tokenizer.json"
    table = json.loads(path.read_text("utf-8"))
    vocabulary = table["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    vocabulary[names[40]], vocabulary[names[41]] = vocabulary[names[41]], vocabulary[names[40]]
    path.write_text(json.dumps(table), "utf-8")
    with pytest.raises(ModelError, match="different vocabularies"):
        AcceptanceHeadTask(load_target(folder / "other"), target, (text,), BATCHES)


def test_heads_of_another_model_are_refused(target: Target, text: TokenFile, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "wide", "llama", hidden_size=64, intermediate_size=48, num_hidden_layers=2)
    wide = export_checkpoint(tmp_path / "wide", tmp_path / "bundle", ExportConfig(32))
    heads: Heads = MedusaTask(target, (text,), BATCHES, SHAPE).heads({})
    with pytest.raises(BundleError, match="of shape"):
        add_heads(wide, heads)
    assert read_heads(open_bundle(wide), "medusa") is None
