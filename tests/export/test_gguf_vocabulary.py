"""Tokenizers of written GGUF files: llama.cpp's ids are tokenizer.json's; what it has no tokenizer for is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from edgeinfer.errors import BundleError, CheckpointError
from edgeinfer.export import ExportConfig, export_checkpoint
from edgeinfer.runtime.text.template import ChatTemplate
from tests.factories import make_checkpoint

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from edgeinfer.bundle import open_bundle
from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.gguf.model import open_gguf
from edgeinfer.bundle.gguf.normalizer import GgufNormalizer
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.export.gguf import pre_tokenizers as names
from edgeinfer.export.gguf.tokenizer_check import ORDINARY, RARE, check_tokenizer, llama_encoder
from edgeinfer.export.gguf.vocabulary import Vocabulary, read_vocabulary
from edgeinfer.export.gguf.writer import write_gguf
from edgeinfer.export.hf_config import read_config
from edgeinfer.runtime.llamacpp.model import LlamaModel
from edgeinfer.runtime.llamacpp.tokenizer import LlamaTokenizer

pytestmark = pytest.mark.gguf

ROWS = 900
UNDERLINE = "\u2581"
SPECIAL = ["<s>", "</s>", "<|user|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(*steps: Any, use_regex: bool = False, normalizer: Any = None, prefix: bool = False) -> Tokenizer:
    """A byte-level tokenizer trained on the texts that exports are checked with."""
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*ORDINARY, *RARE] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def whole_words(tokenizer: Tokenizer) -> Tokenizer:
    """The same with words of the vocabulary taken whole, one of which no merges lead to."""
    parsed = json.loads(tokenizer.to_str())
    parsed["model"]["vocab"]["\u0120doing"] = 850
    parsed["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(parsed))


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def pieces(normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    """A tokenizer like SentencePiece's: pieces with underlines for spaces, and bytes for what has none."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator((UNDERLINE + word for text in ORDINARY * 3 for word in text.split()), trainer)
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    if pre_tokenizer is None:
        escape = normalizers.Replace(" ", UNDERLINE)
        normalizer = normalizer or normalizers.Sequence([normalizers.Prepend(UNDERLINE), escape])
    else:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    steps = [decoders.Replace(UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefixed = getattr(pre_tokenizer, "prepend_scheme", "always") != "never"
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace(scheme: str) -> Any:
    return pre_tokenizers.Metaspace(replacement=UNDERLINE, prepend_scheme=scheme, split=False)


def sentence_piece_spaces() -> Any:
    """The normalizer of tokenizers whose models drop spaces that say nothing."""
    trim = normalizers.Replace(Regex(r"\A +| +\z"), "")
    steps = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Prepend(UNDERLINE)]
    return normalizers.Sequence([trim, *steps, normalizers.Replace(" ", UNDERLINE)])


_DEEPSEEK_CODER = (*map(split, names._DEEPSEEK_CODER[:-1]), pre_tokenizers.Digits(individual_digits=True))
# By llama.cpp's name of the pre-tokenizer and what is special about it.
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level(use_regex=True),
    "gpt-2 nfc": lambda: byte_level(use_regex=True, normalizer=normalizers.NFC()),
    "gpt-2 prefix": lambda: byte_level(use_regex=True, prefix=True),
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "dbrx": lambda: byte_level(split(names._LLAMA3)),
    "llama-bpe": lambda: whole_words(byte_level(split(names._LLAMA3))),
    "qwen2": lambda: byte_level(split(names._QWEN2), normalizer=normalizers.NFC()),
    "qwen35": lambda: byte_level(split(names._QWEN35)),
    "tekken": lambda: whole_words(byte_level(split(names._TEKKEN))),
    "gpt-4o": lambda: byte_level(split(names._GPT4O)),
    "deepseek-coder": lambda: byte_level(*_DEEPSEEK_CODER),
    "deepseek-v3": lambda: byte_level(*map(split, names._DEEPSEEK_V3)),
    "default": pieces,
    "default first": lambda: pieces(pre_tokenizer=metaspace("first")),
    "default always": lambda: pieces(pre_tokenizer=metaspace("always")),
    "default never": lambda: pieces(pre_tokenizer=metaspace("never")),
    "default spaces": lambda: pieces(normalizer=sentence_piece_spaces()),
}
# Texts of those that exports are checked with: combining marks, where llama.cpp's patterns leave them out, and a space
# alone, before which llama.cpp puts another.
DIFFERENT = {"tekken": 2, "gpt-4o": 2, "default always": 1}


def checkpoint(folder: Path, tokenizer: Tokenizer, template: str | None = None, rows: int = ROWS) -> Path:
    """A tiny checkpoint with a tokenizer."""
    make_checkpoint(folder, "llama-tied", chat_template=template, vocab_size=rows)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def written(folder: Path, tokenizer: Tokenizer, **given: Any) -> tuple[Path, Vocabulary]:
    source = checkpoint(folder / "checkpoint", tokenizer, **given)
    write_gguf(source, folder / "model.gguf")
    config = read_config(source)
    return folder / "model.gguf", read_vocabulary(source, config, config.integer("vocab_size"))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_checkpoints_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    path, vocabulary = written(tmp_path, tokenizer)
    assert vocabulary.pre == name.split()[0]
    found = check_tokenizer(path, tokenizer.to_str().encode(), vocabulary)
    assert found.texts > len(ORDINARY) + len(RARE)
    assert len(found.different) == DIFFERENT.get(name, 0), found.different


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tokenizer, Vocabulary]]:
    found = {}
    for name in ("gpt-2", "qwen2", "default", "default spaces", "default first"):
        tokenizer = TOKENIZERS[name]()
        path, vocabulary = written(tmp_path_factory.mktemp(name.replace(" ", "-")), tokenizer)
        found[name] = path, tokenizer, vocabulary
    return found


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "default", "default spaces", "default first"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(
        st.sampled_from([*"ab1 .,\n\t'", "  ", "the", " dog", "\u00e9", "\u4f60", "\U0001f600", *SPECIAL, "<think>"]),
        max_size=12,
    ).map("".join)
)
def test_any_text_gives_the_same_ids(
    encoders: dict[str, tuple[Path, Tokenizer, Vocabulary]], name: str, text: str
) -> None:
    path, tokenizer, vocabulary = encoders[name]
    normalize = GgufNormalizer(vocabulary.steps, vocabulary.special)
    with llama_encoder(path) as encode:
        assert encode(normalize(text)) == tokenizer.encode(text).ids


@pytest.mark.parametrize("name", [n for n in TOKENIZERS if n.split()[0] in ("default", "gpt-2", "qwen2")])
def test_the_runtime_makes_the_same_ids_and_texts(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    path, _ = written(tmp_path, tokenizer)
    model = LlamaModel(read_gguf(path))
    found = LlamaTokenizer(model)
    for text in (*ORDINARY, "<|user|> a dog <s>the end</s>", "a <think>b", "\u00e9 \U0001f600 <unk>"):
        ids = tokenizer.encode(text).ids
        assert found.encode(text) == ids
        for skip in (True, False):
            assert found.decode(ids, skip) == tokenizer.decode(ids, skip), (text, skip)
    model.close()


def test_rows_without_a_token_are_unused(tmp_path: Path) -> None:
    _, vocabulary = written(tmp_path, byte_level(use_regex=True))
    size = len(vocabulary.tokens)
    assert size == len(vocabulary.types) == ROWS
    assert vocabulary.tokens[-1] == f"[PAD{ROWS - 1}]" and vocabulary.types[-1] == 5
    assert vocabulary.types[vocabulary.tokens.index("<s>")] == 3
    assert vocabulary.types[vocabulary.tokens.index("<think>")] == 4


def test_pieces_have_bytes_an_unknown_and_scores_in_the_order_of_merges(tmp_path: Path) -> None:
    tokenizer = pieces()
    _, vocabulary = written(tmp_path, tokenizer)
    types = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert types["<0x41>"] == 6 and types["<unk>"] == 2 and types["</s>"] == 3
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    merges = ["".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    ranked = [scores[merged] for merged in dict.fromkeys(merges)]
    assert ranked == sorted(ranked, reverse=True) and len(set(ranked)) == len(ranked)


def test_special_ids_and_what_is_put_around_a_text(tmp_path: Path) -> None:
    path, vocabulary = written(tmp_path, pieces())
    assert vocabulary.add_bos and not vocabulary.add_eos
    assert vocabulary.ids["bos"] == 1 and vocabulary.tokens[vocabulary.ids["eos"]] == "</s>"
    bundle = open_gguf(path)
    assert bundle.read_object("generation_config.json")["bos_token_id"] == 1
    tokenizer = byte_level(use_regex=True)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    path, vocabulary = written(tmp_path / "both", tokenizer)
    assert (vocabulary.add_bos, vocabulary.add_eos) == (True, True)
    with llama_encoder(path) as encode:
        assert encode("a dog") == tokenizer.encode("a dog").ids


def test_a_second_end_is_the_end_of_a_turn(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", byte_level(use_regex=True))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}), "utf-8")
    vocabulary = read_vocabulary(source, read_config(source), ROWS)
    assert (vocabulary.ids["eos"], vocabulary.ids["eot"]) == (1, 2)


def test_a_checkpoint_that_names_no_end_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", byte_level(use_regex=True))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": None}), "utf-8")
    (source / "tokenizer_config.json").write_text("{}", "utf-8")
    (source / "generation_config.json").unlink()
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
        (lambda: byte_level(split(r"\w+")), r"cuts words as .*: \\w\+\."),
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
    source = checkpoint(tmp_path / "checkpoint", make())
    with pytest.raises(CheckpointError, match=what):
        write_gguf(source, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_words_taken_whole_that_merges_lead_to_anyway_make_no_difference(tmp_path: Path) -> None:
    parsed = json.loads(byte_level(split(names._QWEN2)).to_str())
    parsed["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    path, vocabulary = written(tmp_path, tokenizer)
    assert vocabulary.pre == "qwen2"
    assert not check_tokenizer(path, tokenizer.to_str().encode(), vocabulary).different


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", byte_level(use_regex=True), rows=700)
    with pytest.raises(CheckpointError, match="the embedding has 700 rows"):
        write_gguf(source, tmp_path / "model.gguf")


def test_an_export_whose_tokens_differ_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "checkpoint", byte_level(use_regex=True))
    monkeypatch.setitem(names._NAMES, (("words",), False), "qwen2")
    with pytest.raises(CheckpointError, match="makes other tokens"):
        export_checkpoint(source, tmp_path / "out", ExportConfig(format="gguf", gguf_type="F16"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(BundleError, match="rot13"):
        GgufNormalizer(["rot13"], [])


def test_conversations_look_as_in_the_bundle_and_as_llama_cpp_renders_them(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", byte_level(use_regex=True), CHATML)
    out = export_checkpoint(source, tmp_path / "out", ExportConfig(format="gguf", gguf_type="F16"))
    messages = [{"role": "user", "content": "Hello \u00e9"}, {"role": "assistant", "content": "Hi."}]
    expected = ChatTemplate(open_bundle(out).read_text("chat_template.jinja"), {}).render(messages)
    template = read_gguf(out / "model.gguf").metadata.text("tokenizer.chat_template")
    assert ChatTemplate(template, {}).render(messages) == expected
    assert open_gguf(out / "model.gguf").read_text("chat_template.jinja") == template == CHATML
    assert rendered(template, messages) == expected


def rendered(template: str, messages: list[dict[str, str]]) -> str:
    """What llama.cpp makes of a template that it knows."""
    import ctypes

    lib = llama_library()
    array = (lib.llama_chat_message * len(messages))()
    for entry, message in zip(array, messages, strict=True):
        entry.role, entry.content = message["role"].encode(), message["content"].encode()
    buffer = ctypes.create_string_buffer(4096)
    size = lib.llama_chat_apply_template(template.encode(), array, len(messages), True, buffer, len(buffer))
    assert size > 0
    return buffer.raw[:size].decode()


@pytest.mark.parametrize("name", ["stories260K", "mico_llama_1m", "mico_llama_3m", "tales"])
def test_published_tokenizers_agree_on_a_thousand_lines(name: str, shared: Path, tmp_path: Path) -> None:
    source = shared / "models" / name
    write_gguf(source, tmp_path / "model.gguf", "F16")
    config = read_config(source)
    vocabulary = read_vocabulary(source, config, config.integer("vocab_size"))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    normalize = GgufNormalizer(vocabulary.steps, vocabulary.special)
    lines = shared_lines(shared / "data")
    assert len(lines) == 1000 and sum(not line.isascii() for line in lines) >= 100
    with llama_encoder(tmp_path / "model.gguf") as encode:
        assert [line for line in lines if encode(normalize(line)) != tokenizer.encode(line).ids] == []


def shared_lines(folder: Path) -> list[str]:
    """Lines from all files, those with more than ASCII first: they are few."""
    lines: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".txt", ".jsonl", ".json", ".md", ".py"):
            found = [line[:1000] for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
            lines += [line for line in found if not line.isascii()][:20] + found[:: max(1, len(found) // 60)][:60]
    return sorted(lines, key=str.isascii)[:1000]
