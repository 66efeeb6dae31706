"""A tokenizer that is mapped from a table: the tokens and texts of the library's, on every kind that has a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.tokenizer_table import TABLE, encode_table
from edgeinfer.errors import TokenizerError
from edgeinfer.export.gguf.route import ORDINARY, RARE
from edgeinfer.runtime.text.streaming import StreamDecoder
from edgeinfer.runtime.text.tokenizer import MappedTokenizer, Tokenizer
from edgeinfer.user_files import user_cache
from tests.export.made_tokenizers import TOKENIZERS, byte_level
from tests.marked_tokenizers import KINDS, MARKS
from tests.tables import each_row

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
    spelled = [kept.id_to_token(id_) for id_ in range(kept.vocab_size)]
    assert [mapped.id_to_token(id_) for id_ in range(kept.vocab_size)] == spelled
    assert mapped.id_to_token(-1) is None and mapped.id_to_token(len(spelled) + 7) is None
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
            text = path.read_text("utf-8")[:100_000]
            for start in range(0, len(text), 20_000):
                part = text[start : start + 20_000]
                assert mapped.encode(part) == kept.encode(part), (path, start)
