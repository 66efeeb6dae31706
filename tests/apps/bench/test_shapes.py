"""Random checkpoints are what they say: sizes, statistics, formats, and a tokenizer that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import Tokenizer

from edgeinfer.apps.bench.model_files import Artifacts
from edgeinfer.apps.bench.synthetic import (
    CHAT_TEMPLATE,
    SHAPES,
    Dtype,
    find_shape,
    pseudo_text,
    synthesize_vocabulary,
    write_random_checkpoint,
    write_tokenizer,
)
from edgeinfer.errors import UsageError
from tests.apps.bench.here import read_tensors
from tests.recorded import check_recorded, sums
from tests.tables import each_row

safetensors = pytest.importorskip("safetensors")
TINY = SHAPES["tiny"]


@each_row(("name", "parameters"), [("qwen2.5-0.5b", 494_032_768), ("llama-3.2-1b", 1_235_814_400)])
def test_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert find_shape(name).parameters == parameters


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"qwen2\.5-0\.5b"):
        find_shape("gpt-5")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_checkpoint_holds_every_tensor_with_its_statistics(tmp_path: Path, dtype: Dtype) -> None:
    torch = pytest.importorskip("torch")
    write_random_checkpoint(tmp_path, TINY, dtype)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == TINY.tensors()
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    matrices = torch.cat([t.float().flatten() for t in tensors.values() if t.ndim == 2])
    assert abs(matrices.std().item() - 0.02) < 2e-4
    assert abs(matrices.mean().item()) < 2e-4
    assert torch.all(tensors["model.norm.weight"].float() == 1)


def test_checkpoints_are_deterministic(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_random_checkpoint(tmp_path / folder, TINY)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="float64"):
        write_random_checkpoint(tmp_path, TINY, "float64")  # type: ignore[arg-type]


def test_transformers_loads_the_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_random_checkpoint(tmp_path, TINY)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.num_parameters() == TINY.parameters
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == TINY.vocab_entries
    assert tokenizer.eos_token_id == json.loads((tmp_path / "config.json").read_text())["eos_token_id"]


@settings(max_examples=20, deadline=None)
@given(entries=st.integers(256, 3000), seed=st.integers(0, 5))
def test_vocabularies_have_the_size_asked_for_and_merges_within_them(entries: int, seed: int) -> None:
    vocabulary, merges = synthesize_vocabulary(entries, seed)
    assert sorted(vocabulary.values()) == list(range(entries))
    assert len(merges) == entries - 256
    assert all({left, right, left + right} <= vocabulary.keys() for left, right in merges)


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="256"):
        synthesize_vocabulary(255)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path, 5000)
    return Tokenizer.from_file(str(path))


def test_every_token_of_the_tokenizer_can_come_out_of_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 5000
    whole = [token for token in tokenizer.get_vocab() if token.startswith("Ġ")]
    assert len(whole) > 4000
    assert all(tokenizer.encode(token.replace("Ġ", " ")).tokens == [token] for token in whole)


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF)))
def test_the_tokenizer_loses_no_text(tokenizer: Tokenizer, text: str) -> None:
    composed = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == composed


def test_the_chat_template_marks_turns_with_special_tokens(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = (
        Environment(autoescape=False).from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text).tokens.count("<|im_start|>") == 2


def test_pseudo_text_is_as_long_as_asked_and_repeatable() -> None:
    assert len(pseudo_text(20).split()) == 20
    assert pseudo_text(20, seed=3) == pseudo_text(20, seed=3) != pseudo_text(20, seed=4)


def test_model_files_are_built_once_and_left_whole(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, TINY)
    before = artifacts.checkpoint().stat().st_mtime_ns
    assert Artifacts(tmp_path, TINY).checkpoint().stat().st_mtime_ns == before
    assert not list((tmp_path / "tiny").glob("*.partial"))


def test_what_is_made_is_what_it_was(tmp_path: Path) -> None:
    """Sizes and settings of all shapes; words, tokens and weights that figures of former runs were taken with."""
    shapes = {
        name: [shape.parameters, len(shape.tensors()), shape.config("bfloat16")] for name, shape in SHAPES.items()
    }
    vocabulary, merges = synthesize_vocabulary(400, 2)
    words = [pseudo_text(12), list(vocabulary)[::25], merges[::25]]
    written = {}
    for dtype in ("float32", "float16", "bfloat16"):
        folder = tmp_path / dtype
        write_random_checkpoint(folder, TINY, dtype, seed=3)
        written[dtype] = {name: (str(v.dtype), v.shape, *sums(v)) for name, v in read_tensors(folder).items()}
    check_recorded("bench-shapes", shapes | {"words": words} | written, rel=1e-3)
    assert len(pseudo_text(12).split(" ")) == 12
