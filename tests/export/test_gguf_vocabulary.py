"""Tokenizers of checkpoints in llama.cpp's terms: what a file says of them, and what llama.cpp has none for."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from edgeinfer.bundle.gguf.normalizer import GgufNormalizer
from edgeinfer.errors import BundleError, CheckpointError, UsageError
from edgeinfer.export.gguf import writer
from edgeinfer.export.gguf.vocabulary import Vocabulary, read_vocabulary
from edgeinfer.export.gguf.writer import write_gguf
from edgeinfer.export.source.hf_config import read_config
from tests.export.made_tokenizers import ROWS, TOKENIZERS, byte_level, pieces, split, whole_words, write_words
from tests.factories import make_checkpoint


def read(folder: Path, tokenizer: Tokenizer, rows: int = ROWS) -> Vocabulary:
    return read_vocabulary(write_words(folder, tokenizer), read_config(folder), rows)


def test_pre_tokenizers_have_llama_cpps_names(tmp_path: Path) -> None:
    found = {name: read(tmp_path / name, make()).pre for name, make in TOKENIZERS.items()}
    assert found == {name: name.split()[0] for name in TOKENIZERS}


def test_steps_that_llama_cpp_lacks_are_taken_before_it(tmp_path: Path) -> None:
    kinds = ("gpt-2", "gpt-2 nfc", "gpt-2 prefix", "default", "default first", "default always", "default spaces")
    found = {name: read(tmp_path / name, TOKENIZERS[name]()) for name in kinds}
    assert {name: vocabulary.steps for name, vocabulary in found.items()} == {
        "gpt-2": (),
        "gpt-2 nfc": ("nfc",),
        "gpt-2 prefix": ("prefix",),
        "default": (),
        "default first": ("first_prefix",),
        "default always": ("unprefix",),
        "default spaces": ("trim_spaces", "join_spaces"),
    }
    assert [name for name, vocabulary in found.items() if vocabulary.prefix] == [
        *("default", "default always", "default spaces")
    ]


def test_rows_without_a_token_are_unused(tmp_path: Path) -> None:
    vocabulary = read(tmp_path, byte_level(use_regex=True))
    size = len(vocabulary.tokens)
    assert size == len(vocabulary.types) == ROWS
    assert vocabulary.tokens[-1] == f"[PAD{ROWS - 1}]" and vocabulary.types[-1] == 5
    assert vocabulary.types[vocabulary.tokens.index("<s>")] == 3
    assert vocabulary.types[vocabulary.tokens.index("<think>")] == 4


def test_pieces_have_bytes_an_unknown_and_scores_in_the_order_of_merges(tmp_path: Path) -> None:
    tokenizer = pieces()
    vocabulary = read(tmp_path, tokenizer)
    types = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert types["<0x41>"] == 6 and types["<unk>"] == 2 and types["</s>"] == 3
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    merges = ["".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    ranked = [scores[merged] for merged in dict.fromkeys(merges)]
    assert ranked == sorted(ranked, reverse=True) and len(set(ranked)) == len(ranked)


def test_special_ids_and_what_is_put_around_a_text(tmp_path: Path) -> None:
    vocabulary = read(tmp_path, pieces())
    assert vocabulary.add_bos and not vocabulary.add_eos
    assert vocabulary.ids["bos"] == 1 and vocabulary.tokens[vocabulary.ids["eos"]] == "</s>"
    tokenizer = byte_level(use_regex=True)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    vocabulary = read(tmp_path, tokenizer)
    assert (vocabulary.add_bos, vocabulary.add_eos) == (True, True)


def test_a_second_end_is_the_end_of_a_turn(tmp_path: Path) -> None:
    source = write_words(tmp_path, byte_level(use_regex=True))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}), "utf-8")
    vocabulary = read_vocabulary(source, read_config(source), ROWS)
    assert (vocabulary.ids["eos"], vocabulary.ids["eot"]) == (1, 2)


def test_a_checkpoint_that_names_no_end_is_refused(tmp_path: Path) -> None:
    source = write_words(tmp_path, byte_level(use_regex=True))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": None}), "utf-8")
    (source / "tokenizer_config.json").write_text("{}", "utf-8")
    with pytest.raises(CheckpointError, match="which token ends a text"):
        read_vocabulary(source, read_config(source), ROWS)


def plain(**model: Any) -> Tokenizer:
    """A byte-level tokenizer whose model is changed."""
    parsed = json.loads(byte_level(use_regex=True).to_str())
    parsed["model"] |= model
    return Tokenizer.from_str(json.dumps(parsed))


def without_a_byte() -> Tokenizer:
    parsed = json.loads(pieces().to_str())
    id_ = parsed["model"]["vocab"].pop("<0x41>")
    parsed["model"]["vocab"]["<no byte>"] = id_
    return Tokenizer.from_str(json.dumps(parsed))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: byte_level(use_regex=True, normalizer=normalizers.Lowercase()), "the normalizer .*Lowercase"),
        (lambda: byte_level(split(r"\w+")), r"splits words as .*: \\w\+\."),
        (lambda: byte_level(pre_tokenizers.Punctuation(), use_regex=True), "Punctuation"),
        (lambda: whole_words(byte_level(use_regex=True)), "words with ignore_merges"),
        (lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True, prefix=True), "each piece"),
        (lambda: plain(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (lambda: pieces(normalizer=normalizers.Replace("a", "b")), "the normalizer"),
        (lambda: pieces(pre_tokenizer=pre_tokenizers.Whitespace()), "pre-tokenizer .*Whitespace"),
        (without_a_byte, "<0x41>"),
        (lambda: Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")), "WordPiece"),
    ],
)
def test_what_llama_cpp_has_no_tokenizer_for_is_refused(
    make: Callable[[], Tokenizer], what: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=what):
        read(tmp_path, make())


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the embedding has only 700 rows"):
        read(tmp_path, byte_level(use_regex=True), 700)


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(BundleError, match="rot13"):
        GgufNormalizer(["rot13"], [])


def test_phi3s_special_tokens_take_the_spaces_that_follow_by_the_models_name() -> None:
    """llama.cpp looks for them in general.name, and stops at a name like that without such tokens."""

    def words(rstrip: bool) -> Vocabulary:
        return Vocabulary(
            "llama", "default", ("<s>", "</s>"), (3, 3), {}, True, False, strips=((), (1,) if rstrip else ())
        )

    assert writer._shown_name("my model", words(True)) == "my model (Phi-3)"
    assert writer._shown_name("Phi-3-mini", words(False)) == "Phi 3-mini"
    assert writer._shown_name("phi3", None) == "Phi 3"


ALIGNMENT = 32


class Kind(IntEnum):
    """Types by llama.cpp's numbers."""

    F32, F16, Q8_0 = 0, 1, 8


class NotingWriter:
    """Records the arguments of `add_...`, by the rest of its name or by the given key."""

    def __init__(self, path: Path, arch: str) -> None:
        self.arch, self.told = arch, dict[str, Any]()
        self.infos: list[tuple[str, tuple[int, ...], int, Kind]] = []
        self.fout: list[BinaryIO] = [path.open("wb")]

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("add_"):
            return lambda *told: self.told.update({name.removeprefix("add_"): told[0]})
        if name.startswith("write_"):
            return lambda: None
        raise AttributeError(name)

    def add_string(self, key: str, value: str) -> None:
        self.told[key] = value

    def add_float32(self, key: str, value: float) -> None:
        self.told[key] = value

    def add_array(self, key: str, value: Any) -> None:
        self.told[key] = list(value)

    def add_tensor_info(self, name: str, shape: tuple[int, ...], dtype: Any, size: int, kind: Kind) -> None:
        self.infos.append((name, tuple(shape), size, kind))

    def write_padding(self, file: BinaryIO, size: int) -> None:
        file.write(bytes(-size % ALIGNMENT))

    def close(self) -> None:
        self.fout[0].close()

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The tensors of plain numbers, as they lie in the file."""
        data, place, found = Path(self.fout[0].name).read_bytes(), 0, {}
        for name, shape, size, kind in self.infos:
            place += -place % ALIGNMENT
            dtype = np.float32 if kind == Kind.F32 else np.float16
            found[name] = np.frombuffer(data[place : place + size], dtype).reshape(shape)
            place += size
        # What follows the last is padding, and less of it than would hold another.
        assert 0 <= len(data) - place <= ALIGNMENT
        return found


class Package:
    """Stands in for the gguf package."""

    GGMLQuantizationType = Kind
    GGML_QUANT_SIZES = {Kind.F32: (1, 4), Kind.F16: (1, 2), Kind.Q8_0: (32, 34)}  # noqa: RUF012

    def __init__(self) -> None:
        self.writers: list[NotingWriter] = []

    def GGUFWriter(self, path: Path, arch: str) -> NotingWriter:  # noqa: N802
        self.writers.append(NotingWriter(path, arch))
        return self.writers[-1]

    @staticmethod
    def quantize(rows: NDArray[np.float32], into: Kind) -> NDArray[np.float32]:
        assert into == Kind.F32
        return rows


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    stand_in = Package()
    monkeypatch.setattr(writer, "gguf_package", lambda: stand_in)
    return stand_in


def write(package: Package, folder: Path, kind: str = "F32", **options: Any) -> NotingWriter:
    write_gguf(folder / "checkpoint", folder / "model.gguf", kind, **options)
    return package.writers[-1]


def test_queries_and_keys_take_llama_cpps_order_and_the_rest_stays(package: Package, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "llama")
    steps: list[tuple[str, int, int]] = []
    written = write(package, tmp_path, vocabulary=False, progress=lambda *step: steps.append(step))
    found, source = written.tensors(), load_file(tmp_path / "checkpoint" / "model.safetensors")
    np.testing.assert_array_equal(found["token_embd.weight"], source["model.embed_tokens.weight"])
    np.testing.assert_array_equal(found["blk.2.ffn_down.weight"], source["model.layers.2.mlp.down_proj.weight"])
    np.testing.assert_array_equal(found["blk.1.attn_v.weight"], source["model.layers.1.self_attn.v_proj.weight"])
    queries = source["model.layers.1.self_attn.q_proj.weight"]
    # Heads of 16: Hugging Face turns place 3 with place 11, llama.cpp neighbours.
    np.testing.assert_array_equal(found["blk.1.attn_q.weight"][16 + 6], queries[16 + 3])
    np.testing.assert_array_equal(found["blk.1.attn_q.weight"][16 + 7], queries[16 + 11])
    assert [step[1:] for step in steps] == [(done, len(found)) for done in range(len(found))]
    assert {step[0] for step in steps} == set(found)


def test_a_file_says_what_its_model_is(package: Package, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "llama-linear-rope")
    written = write(package, tmp_path, vocabulary=False)
    told = written.told
    sizes = ("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length")
    assert (written.arch, [told[size] for size in sizes]) == ("llama", [320, 128, 64, 3, 96])
    assert [told[count] for count in ("head_count", "head_count_kv", "key_length", "value_length")] == [4, 2, 16, 16]
    assert (told["file_type"], told["tokenizer_model"], told["name"]) == (0, "no_vocab", "checkpoint")
    assert (told["rope_dimension_count"], told["rope_freq_base"]) == (16, 1e4)
    assert (told["llama.rope.scaling.type"], told["rope_scaling_factor"]) == ("linear", 4.0)
    assert "expert_count" not in told


@pytest.mark.parametrize(
    ("arch", "wanted"),
    [
        ("qwen2-moe", {"expert_count": 6, "expert_used_count": 3, "expert_shared_feed_forward_length": 64}),
        ("qwen3-moe", {"expert_count": 6, "expert_feed_forward_length": 32, "key_length": 32}),
        ("granite-moe", {"granitemoe.embedding_scale": 3.0, "granitemoe.logit_scale": 2.5}),
    ],
)
def test_experts_and_multipliers_are_told(package: Package, tmp_path: Path, arch: str, wanted: dict[str, Any]) -> None:
    make_checkpoint(tmp_path / "checkpoint", arch)
    written = write(package, tmp_path, vocabulary=False)
    assert {name: written.told[name] for name in wanted} == wanted
    gates = written.tensors()["blk.0.ffn_gate_exps.weight"]
    assert gates.shape[0] == 6 and len({gate.tobytes() for gate in gates}) == 6


def test_scaled_rotations_are_tensors(package: Package, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one" / "checkpoint", "llama-llama3-rope")
    factors = write(package, tmp_path / "one", vocabulary=False).tensors()["rope_freqs.weight"]
    # Fast places turn as before, slow ones by the factor more slowly.
    assert factors[0] == 1 and factors[-1] == pytest.approx(8)
    make_checkpoint(tmp_path / "two" / "checkpoint", "phi3-longrope")
    written = write(package, tmp_path / "two", vocabulary=False)
    np.testing.assert_allclose(written.tensors()["rope_factors_long.weight"], [2.0 + 0.5 * i for i in range(8)])
    assert written.told["rope_scaling_orig_ctx_len"] == 32


def test_norms_stay_float32_and_what_is_too_large_for_float16_is_refused(package: Package, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", "llama")
    written = write(package, tmp_path, "F16", vocabulary=False)
    kinds = {name: kind for name, _, _, kind in written.infos}
    assert {kinds[name] for name in kinds if "norm" in name} == {Kind.F32}
    assert {kinds[name] for name in kinds if "norm" not in name} == {Kind.F16}
    values = written.tensors()["token_embd.weight"]
    np.testing.assert_array_equal(values, model.model.embed_tokens.weight.detach().numpy().astype(np.float16))
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = 1e5
    model.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_down\.weight"):
        write(package, tmp_path, "F16", vocabulary=False)


def test_words_are_told_with_merges_or_with_scores(package: Package, tmp_path: Path) -> None:
    for name, tokenizer in (("gpt2", byte_level(use_regex=True)), ("llama", pieces())):
        make_checkpoint(tmp_path / name / "checkpoint", "llama-tied", vocab_size=ROWS)
        config = (tmp_path / name / "checkpoint" / "config.json").read_bytes()
        write_words(tmp_path / name / "checkpoint", tokenizer)
        (tmp_path / name / "checkpoint" / "config.json").write_bytes(config)
        told = write(package, tmp_path / name).told
        assert told["tokenizer_model"] == name and len(told["token_list"]) == len(told["token_types"]) == ROWS
        assert ("token_merges" in told) == (name == "gpt2")
        assert ("token_scores" in told) == (name == "llama")
        assert told["token_list"][told["eos_token_id"]] == "</s>"


def test_without_the_package_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(writer, "import_module", missing)
    make_checkpoint(tmp_path / "checkpoint", "llama")
    with pytest.raises(UsageError, match="gguf package is not installed"):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", vocabulary=False)
