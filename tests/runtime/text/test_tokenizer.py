"""Tokenizers: special tokens, bad input and files, threads, and tables that are mapped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from edgeinfer.bundle.tokenizer_table import TABLE, encode_table
from edgeinfer.core.errors import PromptError, TokenizerError
from edgeinfer.core.user_files import user_cache
from edgeinfer.export.gguf.route import ORDINARY, RARE
from edgeinfer.runtime.text import tokenizer
from edgeinfer.runtime.text.contract import longest_token, surely_longer
from edgeinfer.runtime.text.streaming import StreamDecoder
from edgeinfer.runtime.text.tokenizer import MappedTokenizer, Tokenizer, file_has_pairs, kept_bytes, parsing_bytes
from tests.export.made_tokenizers import TOKENIZERS, byte_level
from tests.marked_tokenizers import KINDS, MARKS
from tests.tables import each_row
from tests.tools.random_models import write_tokenizer
from tests.waiting import TIME_LIMIT


@pytest.fixture
def backend() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|end|>"])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return backend


@pytest.fixture
def path(backend: Any, tmp_path: Path) -> Path:
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_special_tokens(path: Path) -> None:
    t = Tokenizer.from_file(path)
    assert (t.vocab_size, t.special_ids) == (259, frozenset({256, 257}))
    assert (t.token_to_id("<|end|>"), t.token_to_id("nope"), t.id_to_token(258)) == (257, None, "<tool>")
    assert t.encode("a<|end|>")[0] == 256
    assert t.encode("a<|end|>", add_special_tokens=False)[1:] == [257]
    assert t.decode(t.encode("héllo<|end|>")) == "héllo"
    assert t.decode(t.encode("héllo<|end|>"), skip_special_tokens=False) == "<s>héllo<|end|>"


def test_plain_text_cannot_inject_special_tokens(path: Path) -> None:
    t = Tokenizer.from_file(path)
    ids = t.encode("a<|end|><s>", add_special_tokens=False, parse_special=False)
    assert not t.special_ids & set(ids)
    assert t.decode(ids) == "a<|end|><s>"
    assert 257 in t.encode("a<|end|>")


def test_texts_and_files_that_cannot_be_taken(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Tokenizer.from_file(path)
    with pytest.raises(PromptError, match="surrogate at index 2"):
        kept.encode("ab\ud800")
    # Files may ask to cut or to pad texts.
    assert [len(kept.encode("a" * size, add_special_tokens=False)) for size in (1, 100)] == [1, 100]
    for file, match in ((tmp_path / "missing.json", "No tokenizer"), (tmp_path, "Cannot read"), (path, "too large")):
        if file == path:
            monkeypatch.setattr(tokenizer, "MAX_FILE_BYTES", 10)
        with pytest.raises(TokenizerError, match=match):
            Tokenizer.from_file(file)


@each_row(
    "change",
    [
        lambda data: data["model"].update(merges=[["zz", "q"]]),
        lambda data: data["post_processor"]["single"][0]["SpecialToken"].update(id="nope"),
        # The library panics.
        lambda data: data.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        dict.clear,
    ],
)
def test_malformed_contents(path: Path, change: Any) -> None:
    data = json.loads(path.read_text("utf-8"))
    change(data)
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_file(path)
    assert "\n" not in caught.value.message and caught.value.hint


@each_row("contents", [b"", b"[]", b"\xff\xfe", b"{", b'{"version": "1.0", "model": {"type": "BPE", ', b"[" * 100_000])
def test_files_that_are_no_tokenizer(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(contents)
    with pytest.raises(TokenizerError):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_threads_do_not_see_each_others_settings(path: Path) -> None:
    t = Tokenizer.from_file(path)

    def encode(parse: bool) -> bool:
        return all((257 in t.encode("x<|end|>", parse_special=parse)) == parse for _ in range(300))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(encode, [True, False] * 2))


def test_a_long_text_holds_the_interpreter_for_nobody(path: Path) -> None:
    """Other threads go on while it is encoded, also those that decode."""
    t, began, ended = Tokenizer.from_file(path), Event(), Event()
    text = "Once upon a time there was a dog. " * 8_000

    def encode() -> list[int]:
        began.set()
        try:
            return t.encode(text)
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        ids = pool.submit(encode)
        assert began.wait(timeout=TIME_LIMIT)
        steps = 0
        while not ended.is_set():
            t.decode([1, 2, 3])
            steps += 1
        assert steps > 100
        assert t.decode(ids.result()) == text


def test_long_texts_have_the_same_tokens_as_short_ones(path: Path) -> None:
    t = Tokenizer.from_file(path)
    text = "Once upon a time, a <|end|> dog  said:\n\n\t12 345 \u00e9\U0001f600! " * 200
    for special in (True, False):
        t._backend.encode_special_tokens = not special
        expected = t._backend.encode(text).ids
        t._backend.encode_special_tokens = False
        assert t.encode(text, parse_special=special) == expected


def test_texts_that_are_surely_too_long(path: Path) -> None:
    t = Tokenizer.from_file(path)
    longest = longest_token(t)
    assert longest == len("<|end|>")
    t._backend.normalizer = normalizers.NFC()
    for text in ("dog ", " ", "a", "e\u0301", "\u00e9", "\U0001f600", "\n", "once upon a time, "):
        for count in (1, 100, 3_000, 30_000):
            tokens = len(t.encode(text * count))
            # Never of what fits.
            assert not surely_longer(t, text * count, tokens, lambda: longest)
            assert not surely_longer(t, text * count, tokens + 5, lambda: longest)
            # Always of what is many times too long.
            if tokens > 100:
                assert surely_longer(t, text * count, tokens // 80, lambda: longest)


_MEASURED = """
import sys
import tokenizers
from pathlib import Path
from edgeinfer.runtime.system.memory import process_memory, release_freed, return_large_frees
from edgeinfer.runtime.text.tokenizer import Tokenizer, file_has_pairs, kept_bytes, parsing_bytes
return_large_frees()
tokenizers.Tokenizer(tokenizers.models.BPE()).encode("a")
release_freed()
before = process_memory()
tokenizer = Tokenizer.from_file(sys.argv[1])
release_freed()
print(process_memory().anonymous - before.anonymous, process_memory().peak_rss - before.rss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
@pytest.mark.parametrize("tokens", [4_000, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pairs", [True, False])
def test_memory_stays_within_its_bounds(tmp_path: Path, tokens: int, pairs: bool) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, tokens)
    if not pairs:
        tokenizer = json.loads(path.read_text("utf-8"))
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
        path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    assert file_has_pairs(path) is pairs
    command = [sys.executable, "-c", _MEASURED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIME_LIMIT)
    kept, peak = map(int, done.stdout.split())
    bound = parsing_bytes(path.stat().st_size, tokens, pairs=pairs)
    assert kept <= kept_bytes(tokens) and peak <= bound
    assert tokens <= 10_000 or peak > 0.6 * bound


WITHOUT = ("unigram", "word pieces", "words")
MADE: dict[str, Callable[[], tokenizers.Tokenizer]] = KINDS | TOKENIZERS
MAPPED = [kind for kind in MADE if kind not in WITHOUT]
TEXTS = [
    *ORDINARY,
    *RARE,
    "naïve 日本語 🙂 text \n\n\ttabs 1234567 DON'T",
    "ｆｕｌｌ Ｗｉｄｔｈ ※ [INST]<0x0A>",
    "a" * 300,
    "",
]
MARKED = st.lists(st.text(max_size=20) | st.sampled_from([*MARKS, *TEXTS, "<think>"]), max_size=6).map("".join)
SHARED = Path(__file__).resolve().parents[3].parent / "shared"


@cache
def pair(kind: str) -> tuple[Tokenizer, MappedTokenizer]:
    contents = encode_table(MADE[kind]().to_str().encode())
    assert contents is not None, kind
    path = user_cache() / f"{kind.replace('/', '')}.table"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)
    return Tokenizer(MADE[kind]()), MappedTokenizer.from_file(path)


@pytest.mark.parametrize("kind", MAPPED)
def test_vocabulary_and_usual_texts_are_the_library_s(kind: str) -> None:
    kept, mapped = pair(kind)
    assert (mapped.vocab_size, mapped.special_ids, mapped.decoder_types, mapped.control_texts) == (
        kept.vocab_size,
        kept.special_ids,
        kept.decoder_types,
        kept.control_texts,
    )
    ids = range(3 * kept.vocab_size)  # where ids leave gaps, the last ones are larger than the vocabulary
    spelled = [kept.id_to_token(id_) for id_ in ids]
    assert [mapped.id_to_token(id_) for id_ in ids] == spelled and mapped.id_to_token(-1) is None
    assert all(mapped.token_to_id(text) == kept.token_to_id(text) for text in [*filter(None, spelled), "nope", ""])
    for text in [*TEXTS, " ".join(TEXTS) * 9]:
        for flags in ((True, True), (True, False), (False, False)):
            assert mapped.encode(text, *flags) == kept.encode(text, *flags), (text, flags)


@pytest.mark.parametrize("kind", MAPPED)
@given(text=MARKED, flags=st.tuples(st.booleans(), st.booleans()), data=st.data())
@settings(max_examples=10, deadline=None)
def test_any_text_and_tokens_are_the_library_s(
    kind: str, text: str, flags: tuple[bool, bool], data: st.DataObject
) -> None:
    kept, mapped = pair(kind)
    assert mapped.encode(text, *flags) == kept.encode(text, *flags)
    parts = [text, MARKS[1], text[::-1], MARKS[0], "b"]
    assert mapped.encode_between(parts) == kept.encode_between(parts)
    ids = data.draw(st.lists(st.integers(0, kept.vocab_size + 3), max_size=30))
    for skip in (True, False):
        assert mapped.decode(ids, skip) == kept.decode(ids, skip)
    one, other = StreamDecoder(kept, ids[:3]), StreamDecoder(mapped, ids[:3])
    assert [one.push(i) for i in ids[3:]] + [one.flush()] == [other.push(i) for i in ids[3:]] + [other.flush()]


def _with(change: Callable[[dict[str, Any]], object]) -> bytes:
    parsed = json.loads(byte_level(use_regex=True).to_str())
    change(parsed)
    return json.dumps(parsed).encode()


@each_row(
    "change",
    [
        lambda t: t["model"].update(dropout=0.1),
        lambda t: t["model"].update(end_of_word_suffix="</w>"),
        lambda t: t["model"].update(continuing_subword_prefix="##"),
        lambda t: t["model"].update(unk_token="<absent>"),
        lambda t: t["model"].update(type="Unigram"),
        lambda t: t["model"].update(some_later_field=True),
        lambda t: t["model"]["merges"].append(["absent", "tokens"]),
        lambda t: t["model"]["vocab"].update({"same id": 5}),
        lambda t: t["model"]["vocab"].update({"far": 1 << 31}),
        # Whole words of a vocabulary that lacks characters could not be distinguished from their symbols.
        lambda t: t["model"].update(ignore_merges=True) or t.update(pre_tokenizer={"type": "WhitespaceSplit"}),
        # The library would give it another id than the file says.
        lambda t: t["added_tokens"][-1].update(id=5000),
        lambda t: t.pop("model"),
    ],
)
def test_what_is_not_merged_plainly_has_no_table(change: Callable[[dict[str, Any]], object]) -> None:
    assert encode_table(_with(lambda tokenizer: None)) is not None
    assert encode_table(_with(change)) is None


@each_row("kind", WITHOUT)
def test_other_models_have_no_table(kind: str) -> None:
    assert encode_table(MADE[kind]().to_str().encode()) is None


@each_row("damage", [lambda d: b"", lambda d: d[:200], lambda d: d[:-1], lambda d: d + b" ", lambda d: b"x" + d])
def test_a_damaged_table_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    whole = encode_table(_with(lambda tokenizer: None))
    assert whole is not None
    path = tmp_path / TABLE
    path.write_bytes(damage(whole))
    with pytest.raises(TokenizerError, match="Cannot use the tokenizer"):
        MappedTokenizer.from_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mico_llama_1m", "stories260K", "tales"])
def test_tokens_of_real_texts_are_the_library_s(tmp_path: Path, model: str) -> None:
    source = SHARED / "models" / model / "tokenizer.json"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    contents = encode_table(source.read_bytes())
    assert contents is not None
    (tmp_path / TABLE).write_bytes(contents)
    kept, mapped = Tokenizer.from_file(source), MappedTokenizer.from_file(tmp_path / TABLE)
    for path in sorted((SHARED / "data").rglob("*")):
        if path.suffix in (".txt", ".json", ".jsonl", ".py", ".md"):
            text = path.read_text("utf-8")[:20_000]
            assert mapped.encode(text) == kept.encode(text), path
