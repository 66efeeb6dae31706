"""Tokenizers of written GGUF files, run by llama.cpp: its ids are tokenizer.json's."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from edgeinfer.bundle.gguf import normalizer as names
from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.gguf.normalizer import GgufNormalizer
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf_bundle import open_gguf
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.tokenizer_table import encode_table
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.gguf.route import ORDINARY, RARE, check_tokenizer, llama_encoder
from edgeinfer.export.gguf.vocabulary import Vocabulary, read_vocabulary
from edgeinfer.export.gguf.writer import write_gguf
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.runtime.backends.llamacpp.model import LlamaModel
from edgeinfer.runtime.backends.llamacpp.tokenizer import LlamaTokenizer
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.text.special_tokens import LiteralEncoder
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.runtime.text.tokenizer import MappedTokenizer
from edgeinfer.runtime.text.tokenizer import Tokenizer as Tokenized
from tests.export.made_tokenizers import ROWS, SPECIAL, TOKENIZERS, byte_level, split
from tests.factories import make_checkpoint
from tests.rare_texts import rare_texts

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.gguf

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Texts of those that exports are checked with: combining marks, where llama.cpp's patterns leave them out, and a space
# alone, before which llama.cpp puts another.
DIFFERENT = {"tekken": 2, "gpt-4o": 2, "default always": 1}


def checkpoint(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    """A tiny checkpoint with a tokenizer."""
    make_checkpoint(folder, "llama-tied", chat_template=template, vocab_size=ROWS)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def written(folder: Path, tokenizer: Tokenizer, **given: Any) -> tuple[Path, Vocabulary]:
    source = checkpoint(folder / "checkpoint", tokenizer, **given)
    write_gguf(source, folder / "model.gguf")
    return folder / "model.gguf", read_vocabulary(source, read_config(source), ROWS)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_checkpoints_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    path, vocabulary = written(tmp_path, tokenizer)
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


@pytest.mark.parametrize("name", [n for n in TOKENIZERS if n.split()[0] in ("default", "gpt-2", "qwen2")])
def test_marks_beside_text_that_looks_like_marks_are_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    path, _ = written(tmp_path, tokenizer)
    model = LlamaModel(read_gguf(path))
    theirs, ours = LiteralEncoder(Tokenized(tokenizer)), LiteralEncoder(LlamaTokenizer(model))
    assert theirs.special_tokens.ids == ours.special_tokens.ids
    mark, other = sorted(ours.special_tokens.ids)[-2:]
    for text in (*ORDINARY, f"a{mark} b", f"  {other}", "<think>x", f" a dog{other}{mark}\n"):
        for parts in (
            [text],
            ["", mark, text],
            [text, mark, f" {text}", other, ""],
            [f"{text} ", mark, "", other, text],
        ):
            ids = ours.encode_parts(parts)
            assert ids == theirs.encode_parts(parts), parts
            controls = [id_ for id_ in ids if id_ in ours.special_tokens.ids.values()]
            assert controls == [ours.special_tokens.ids[text] for text in parts[1::2]], parts
    model.close()


def test_words_taken_whole_that_merges_lead_to_anyway_make_no_difference(tmp_path: Path) -> None:
    parsed = json.loads(byte_level(split(names.QWEN2)).to_str())
    parsed["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    path, vocabulary = written(tmp_path, tokenizer)
    assert vocabulary.pre == "qwen2"
    assert not check_tokenizer(path, tokenizer.to_str().encode(), vocabulary).different


def test_an_export_whose_tokens_differ_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "checkpoint", byte_level(use_regex=True))
    wrong = names.PreTokenizer("qwen2", ("words",))
    monkeypatch.setattr("edgeinfer.export.gguf.vocabulary.PRE_TOKENIZERS", (wrong,))
    with pytest.raises(CheckpointError, match="tokenizes text"):
        export_checkpoint(source, tmp_path / "out", ExportConfig(format="gguf", gguf_type="F16"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


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


# Of text, though they are spelled like tokens that end replies or fill gaps.
_TEXT_TOKENS = ("<EOT>", "<PAD>", "[EOS]", "<|eot_id|>", "<PRE>")


def as_others_write_them() -> Tokenizer:
    """What GGUF has no keys for: composed text, special tokens that take white space, tokens that are text."""
    parsed = json.loads(byte_level(split(names.QWEN2), normalizer=normalizers.NFC()).to_str())
    parsed["model"]["vocab"] |= {text: 860 + place for place, text in enumerate(_TEXT_TOKENS)}
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    tokenizer.add_tokens([AddedToken("</tool>", normalized=False)])
    for place, way in enumerate(({"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True})):
        tokenizer.add_special_tokens([AddedToken(f"<|strip{place}|>", normalized=False, **way)])
    return tokenizer


@pytest.mark.parametrize("name", ["others", "smollm", "llama-bpe", "default", "default first"])
def test_rare_texts_have_the_checkpoints_ids_at_every_door(name: str, tmp_path: Path) -> None:
    """5,000 of them, raw and as data, for the tokenizers of the bundle and of the GGUF file."""
    tokenizer = as_others_write_them() if name == "others" else TOKENIZERS[name]()
    path, _ = written(tmp_path, tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tables = encode_table(tokenizer.to_str().encode("utf-8"))
    model = LlamaModel(read_gguf(path))
    doors: list[TokenizerLike] = [LlamaTokenizer(model), Tokenized.from_file(tmp_path / "tokenizer.json")]
    if tables is not None:
        (tmp_path / "tokenizer.table").write_bytes(tables)
        doors.append(MappedTokenizer.from_file(tmp_path / "tokenizer.table"))
    special = [*_TEXT_TOKENS, *(token.content for token in tokenizer.get_added_tokens_decoder().values())]
    ends = open_gguf(path).read_object("generation_config.json")["eos_token_id"]
    assert not set(_TEXT_TOKENS) & {tokenizer.id_to_token(end) for end in ends}
    texts = rare_texts(5000, 7, special)
    expected = [each.ids for each in tokenizer.encode_batch_fast(texts)]
    for door in doors:
        different = [text for text, ids in zip(texts, expected, strict=True) if door.encode(text) != ids]
        assert not different, (type(door), len(different), sorted(different, key=len)[:3])
    tokenizer.encode_special_tokens = True
    for text in texts[:500]:
        for door in doors:
            assert door.encode(text, parse_special=False) == tokenizer.encode(text).ids, (type(door), text)
    model.close()
