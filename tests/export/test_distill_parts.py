"""What training drafters and exits is made of: sizes, losses, probabilities, text, samples, targets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from transformers.utils import logging as library

from edgeinfer.core.errors import ModelError, StorageError, TemplateError, UsageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.training.drafter import (
    StudentSize,
    TargetCosts,
    choose_size,
    expected_tokens,
    make_student,
    measure_acceptance,
    run_lengths,
)
from edgeinfer.export.training.losses import (
    TOP_TOKENS,
    cross_entropy,
    divergence,
    in_pieces,
    taught_divergence,
    teacher_probabilities,
)
from edgeinfer.export.training.models import (
    Target,
    hidden_states,
    layer_states,
    load_target,
    require_plain,
    save_checkpoint,
)
from edgeinfer.export.training.samples import SampleOptions, TorchReplier, sample
from edgeinfer.export.training.text import TextSource, open_tokens, write_tokens
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint
from tests.tables import each_row
from tests.tools.dialogues import clean, dialogue, main, names_in

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[say]{% endif %}"
STORY = (
    "Lily had a red ball. One day Lily and Tom ran to the park. The ball went up and Lily laughed, and Tom said so. "
    * 3
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "checkpoint"
    make_checkpoint(folder, "llama", chat_template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Target:
    return load_target(checkpoint)


# Targets


@each_row("arch", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_a_bundle_is_its_checkpoint_again(tmp_path: Path, arch: str) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", arch)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32))
    tokens = torch.arange(12)[None]
    for name in ("checkpoint", "bundle"):
        found = load_target(tmp_path / name)
        assert torch.allclose(found.model(tokens).logits, model(tokens).logits, atol=1e-4)
        assert not any(p.requires_grad for p in found.model.parameters())
        assert (found.begin, found.ends) == (0, (1,))


def test_targets_of_other_weights_have_other_digests(tmp_path: Path, target: Target) -> None:
    make_checkpoint(tmp_path / "other", "llama", seed=1)
    assert load_target(tmp_path / "other").digest != target.digest
    assert load_target(target.folder).digest == target.digest


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "mixture", "mixtral")
    with pytest.raises(ModelError, match="mixtral"):
        load_target(tmp_path / "mixture")


# Losses


def test_losses_in_pieces_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(13, 6, requires_grad=True), torch.randn(31, 6, requires_grad=True)
    labels = torch.randint(31, (13,))

    def piece(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(states @ head.T, wanted, reduction="sum")

    whole = F.cross_entropy(hidden @ head.T, labels)
    expected = torch.autograd.grad(whole, (hidden, head))
    for most in (31, 4 * 31, 10_000):
        found = in_pieces(piece, 31, hidden, labels, most=most)
        assert torch.allclose(found, whole)
        for ours, theirs in zip(torch.autograd.grad(found, (hidden, head)), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.allclose(cross_entropy(hidden, head, labels), whole)


def test_divergence_of_laws_known_in_part_is_at_most_that_of_whole_ones() -> None:
    torch.manual_seed(1)
    hidden, head = torch.randn(9, 6), torch.randn(40, 6)
    teacher, teacher_head = torch.randn(9, 5), 3 * torch.randn(40, 5)
    distribution, guess = torch.log_softmax(teacher @ teacher_head.T, -1), torch.log_softmax(hidden @ head.T, -1)
    exact = (distribution.exp() * (distribution - guess)).sum(-1).mean()
    assert torch.allclose(divergence(hidden, head, teacher, teacher_head), exact, atol=1e-5)
    known = torch.topk(distribution, 39)
    assert torch.allclose(taught_divergence(hidden, head, known.indices, known.values), exact, atol=1e-4)
    fewer = torch.topk(distribution, 5)
    assert 0 < taught_divergence(hidden, head, fewer.indices, fewer.values) < exact


# Sizes


def test_sizes_are_parsed_and_counted(target: Target) -> None:
    size = StudentSize.parse("64x2")
    assert (size.width, size.layers, size.heads, size.kv_heads) == (64, 2, 2, 1)
    student = make_student(size, target, 0)
    vectors = sum(p.numel() for p in student.parameters() if p.ndim == 1)
    assert size.weights(320) == sum(p.numel() for p in student.parameters()) - vectors
    for wrong in ("", "64", "x2", "33x1", "64x0", "-64x1"):
        with pytest.raises(UsageError):
            StudentSize.parse(wrong)


COSTS = TargetCosts({1: 10.0, 2: 10.5, 4: 11.0, 8: 12.0, 16: 15.0}, 1_000_000_000, 24)


def test_the_predicted_speedup_is_that_of_rounds() -> None:
    choice = choose_size(COSTS, 32_000)
    accepted = np.random.default_rng(0).random((20_000, 15)) < choice.acceptance
    runs = np.logical_and.accumulate(accepted, axis=1)
    speedups = {}
    for drafted in range(1, 16):
        tokens = 1 + runs[:, :drafted].sum(axis=1).mean()
        speedups[drafted] = tokens * COSTS.verify_ms(1) / (drafted * choice.draft_ms + COSTS.verify_ms(drafted + 1))
    assert choice.speedup == pytest.approx(speedups[choice.drafted], rel=0.01)
    assert max(speedups.values()) < 1.01 * choice.speedup
    assert expected_tokens(0.5, 2) == 1.75


def test_dear_layers_make_drafters_shallow_and_dear_weights_narrow() -> None:
    passes = {1: 10.0, 8: 11.0}
    cheap = choose_size(TargetCosts(passes, 10**9, 24, call_ms=0.01, layer_ms=0.0), 32_000).size
    costly = choose_size(TargetCosts(passes, 10**9, 24, call_ms=0.01, layer_ms=0.4), 32_000).size
    assert costly.layers == 1 <= cheap.layers
    assert choose_size(TargetCosts(passes, 10**7, 24), 32_000).size.width < cheap.width


def test_a_pass_of_one_row_must_be_measured() -> None:
    with pytest.raises(UsageError, match="not measured"):
        TargetCosts({2: 1.0}, 10, 1)


# Text


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines), "utf-8")
    return path


def test_documents_and_dialogues_become_tokens(tmp_path: Path, target: Target) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("a dog\nran<|endoftext|>\n<|endoftext|> the cat ", "utf-8")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    lines = write(tmp_path / "b.jsonl", [{"text": "she said"}, {"messages": [*turns, *turns]}])
    source = TextSource((plain, lines), target)
    tokens = source.tokenise(tmp_path / "tokens")
    ids = tokens.ids.tolist()
    parts = "".join(target.tokenizer.decode(ids, skip_special_tokens=False).split(target.tokenizer.id_to_token(0)))
    dialogue_text = "[user]hi[assistant]you" * 2
    assert parts == f"a dog\nranthe catshe said{dialogue_text}"
    assert ids.count(0) == 4
    prompts = [target.tokenizer.decode(p.tolist()) for p in source.prompts(100)]
    assert prompts[-2:] == ["[user]hi[say]", "[user]hi[assistant]you[user]hi[say]"]
    assert len(prompts) == 5 and len(source.prompts(2)) == 2
    assert source.tokens(tmp_path).digest == source.tokens(tmp_path).digest == tokens.digest


@each_row("content", ["{", '{"other": 1}', '{"text": 3}', "[1]"])
def test_text_that_is_none_is_refused(tmp_path: Path, target: Target, content: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content, "utf-8")
    with pytest.raises(UsageError, match="jsonl"):
        TextSource((file,), target).tokenise(tmp_path / "tokens")
    with pytest.raises(UsageError, match=r"missing\.txt"):
        TextSource((tmp_path / "missing.txt",), target)


def test_dialogues_need_a_template(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "llama")
    lines = write(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(TemplateError, match="no chat template"):
        TextSource((lines,), load_target(tmp_path / "plain")).tokenise(tmp_path / "tokens")


def test_tokens_are_drawn_by_seed_and_step(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "t", [np.arange(50), np.arange(50, 100)])
    assert open_tokens(tmp_path / "t").digest == tokens.digest
    batch = tokens.batch(1, 2, 3, 10)
    assert (np.diff(batch) == 1).all() and batch.shape == (3, 10)
    assert np.array_equal(batch, tokens.batch(1, 2, 3, 10)) and not np.array_equal(batch, tokens.batch(1, 3, 3, 10))
    seen, held_out = tokens.split(0.1)
    assert (seen.ids.max(), held_out.ids.min(), len(held_out)) == (89, 90, 10)
    with pytest.raises(UsageError, match="100 tokens, and 101"):
        tokens.require(101, "The text")
    with pytest.raises(StorageError):
        open_tokens(tmp_path / "missing")


def test_dialogues_are_made_of_stories_that_are_not_left_out(tmp_path: Path) -> None:
    import random

    story = clean(STORY)
    assert story is not None and names_in(story) == ["Lily", "Tom"]
    assert clean("Too short.") is None
    turns = [dialogue(story, random.Random(seed)) for seed in range(40)]
    assert all(t[0]["role"] == "user" and len(t) in (2, 4) for t in turns)
    renamed = next(t for t in turns if len(t) == 4 and "but call Lily" in t[2]["content"])
    assert "Lily" not in renamed[3]["content"] and "Tom" in renamed[3]["content"]
    stories = [f"Number {i}. {STORY}".strip() for i in range(60)]
    (tmp_path / "stories").mkdir()
    write(tmp_path / "stories" / "s.jsonl", [{"text": each} for each in stories])
    (tmp_path / "excluded.json").write_text(json.dumps(["Number 7."]))
    for name in ("a.jsonl", "b.jsonl"):
        main([str(tmp_path / "stories"), str(tmp_path / name), "--exclude", str(tmp_path / "excluded.json")])
    made = (tmp_path / "a.jsonl").read_text()
    assert made == (tmp_path / "b.jsonl").read_text()
    assert made.count("\n") == 59 and "Number 7." not in made


# Samples and probabilities


PROMPTS = [np.array([0, *range(5, 5 + n)], np.int64) for n in (3, 6, 4, 9)]


def test_replies_drawn_together_are_those_drawn_alone(target: Target) -> None:
    replier = TorchReplier(target)
    together = replier.replies(PROMPTS, [0.0] * 4, 10, 0)
    alone = [replier.replies([prompt], [0.0], 10, 0)[0] for prompt in PROMPTS]
    assert together == alone
    for prompt, reply in zip(PROMPTS, together, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *reply]])
        greedy = target.model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        assert greedy == reply
    drawn = [replier.replies(PROMPTS, [1.0] * 4, 10, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


class Counting:
    """Draws a fixed reply, and is interrupted now and then."""

    name, context = "counting", 64

    def __init__(self, stops_at: int = -1) -> None:
        self.calls, self._stops_at = 0, stops_at

    def replies(
        self, prompts: Sequence[NDArray[np.int64]], temperatures: Sequence[float], most: int, seed: int
    ) -> list[list[int]]:
        if self.calls == self._stops_at:
            raise KeyboardInterrupt
        self.calls += 1
        return [[seed % 7, len(prompt)] for prompt in prompts]


def test_sampling_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    options = SampleOptions(tokens=100, rows=2)
    whole = sample(Counting(), PROMPTS, options, tmp_path / "whole", "t")
    with pytest.raises(KeyboardInterrupt):
        sample(Counting(stops_at=3), PROMPTS, options, tmp_path / "work", "t")
    again = Counting()
    found = sample(again, PROMPTS, options, tmp_path / "work", "t")
    assert found.digest == whole.digest and len(found) >= 100
    rest = Counting()
    assert sample(rest, PROMPTS, options, tmp_path / "work", "t").digest == whole.digest
    assert rest.calls == 0 < again.calls
    assert len(list((tmp_path / "work").iterdir())) == 1
    other = Counting()
    sample(other, PROMPTS, options, tmp_path / "work", "another target")
    assert other.calls and len(list((tmp_path / "work").iterdir())) == 2
    with pytest.raises(UsageError, match="no prompts"):
        sample(Counting(), [], options, tmp_path / "none", "t")


def test_laws_are_the_targets_likeliest_tokens(tmp_path: Path, target: Target) -> None:
    tokens = write_tokens(tmp_path / "t", [np.random.default_rng(0).integers(2, 320, 70)])
    taught = teacher_probabilities(target, tokens, 16, tmp_path)
    assert len(taught) == 4
    ids, likeliest, logs = taught.batch(0, 0, 3)
    expected = torch.topk(torch.log_softmax(target.model(ids).logits, -1), TOP_TOKENS)
    assert torch.allclose(logs, expected.values, atol=1e-2)
    assert (likeliest == expected.indices).float().mean() > 0.95
    assert teacher_probabilities(target, tokens, 16, tmp_path).digest == taught.digest
    assert teacher_probabilities(target, tokens, 8, tmp_path).digest != taught.digest
    with pytest.raises(UsageError, match="70 tokens, and 71"):
        teacher_probabilities(target, tokens, 71, tmp_path / "short")


# Students and depths


def test_a_student_is_saved_as_a_checkpoint_that_exports(tmp_path: Path, target: Target) -> None:
    student = make_student(StudentSize.of(64, 1), target, 0)
    assert student.config.vocab_size == 320
    out = tmp_path / "student"
    save_checkpoint(student, target, out)
    save_checkpoint(student, target, out)
    assert [path.name for path in tmp_path.iterdir()] == ["student"]
    export_checkpoint(out, tmp_path / "bundle", ExportConfig(bits=32))
    tokens = torch.arange(12)[None]
    assert torch.allclose(load_target(tmp_path / "bundle").model(tokens).logits, student(tokens).logits, atol=1e-4)


def test_checkpoints_are_saved_and_loaded_without_bars_of_the_library(
    tmp_path: Path, target: Target, capfd: pytest.CaptureFixture[str]
) -> None:
    library.enable_progress_bar()  # type: ignore[no-untyped-call]
    save_checkpoint(make_student(StudentSize.of(64, 1), target, 0), target, tmp_path / "student")
    load_target(tmp_path / "student")
    assert capfd.readouterr() == ("", "")
    assert library.is_progress_bar_enabled()


def test_a_student_begins_with_the_targets_directions(target: Target) -> None:
    """A student of the target's width has all directions, so tokens are as alike as they are to the target."""
    student = make_student(StudentSize.of(64, 1), target, 0)
    head, own = target.model.lm_head.weight, student.lm_head.weight
    assert torch.allclose(own @ own.T, head @ head.T, atol=1e-3)


def test_states_by_layer_are_the_models_own(target: Target) -> None:
    tokens = torch.randint(2, 320, (2, 9), generator=torch.Generator().manual_seed(0))
    found = layer_states(target.model, tokens)
    assert len(found) == 3
    assert torch.allclose(found[-1], hidden_states(target.model, tokens), atol=1e-5)
    states = target.model.model(tokens, output_hidden_states=True).hidden_states
    assert torch.allclose(found[0], target.model.model.norm(states[1]).flatten(0, 1), atol=1e-5)
    without = layer_states(target.model, tokens, {1, 2})
    assert torch.equal(without[0], without[2]) and torch.equal(without[0], found[0])


def test_windows_cannot_be_trained_layer_by_layer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "mistral", "mistral")
    with pytest.raises(UsageError, match="sliding windows"):
        require_plain(load_target(tmp_path / "mistral").model)


def test_acceptance_is_that_of_rounds() -> None:
    assert run_lengths(np.array([1, 0, 1, 1, 1, 0, 0, 1, 1, 1], bool), 2) == [1, 2, 0, 0, 2]
    assert run_lengths(np.zeros(5, bool), 2) == [0, 0, 0]


def test_a_model_accepts_itself(target: Target) -> None:
    windows = np.random.default_rng(1).integers(2, 320, (3, 20))
    found = measure_acceptance(target.model, target.model, windows)
    assert (found.agreement, found.mean_accepted_length) == (1.0, 5.0)
    assert found.overlap == pytest.approx(1, abs=1e-5) and abs(found.divergence) < 1e-5
    one = measure_acceptance(target.model, target.model, windows, depth=1)
    assert one.agreement < 1 and one.divergence > 0
