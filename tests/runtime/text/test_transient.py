"""A tokenizer that leaves memory between prompts: the same tokens and text as one that stays, in less memory."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from edgeinfer.apps.bench.synthetic import write_tokenizer
from edgeinfer.errors import TokenizerError
from edgeinfer.hub import resolve
from edgeinfer.runtime.text.streaming import StreamDecoder
from edgeinfer.runtime.text.tokenizer import Tokenizer, kept_bytes, parsing_bytes, table_bytes
from edgeinfer.runtime.text.transient import TransientTokenizer, tokenizer_facts
from tests.cli import TIME_LIMIT

SENTENCES = ["Once upon a time there was a café.", "naïve 日本語 🙂 text", "a a a b b"]
TEXTS = st.text() | st.sampled_from([*SENTENCES, "a<|end|>b<tool é>"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with special and other added tokens, and a hole in its ids."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<|end|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([AddedToken("<tool é>", special=False)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="module")
def pair(path: Path) -> tuple[Tokenizer, TransientTokenizer]:
    return Tokenizer.from_file(path), TransientTokenizer.from_file(path)


def test_what_is_asked_of_both_is_the_same(pair: tuple[Tokenizer, TransientTokenizer]) -> None:
    kept, transient = pair
    transient.rest()
    assert (kept.vocab_size, kept.special_ids, kept.decoder_types) == (
        transient.vocab_size,
        transient.special_ids,
        transient.decoder_types,
    )
    ids = range(-1, kept.vocab_size + 3)
    assert [transient.id_to_token(i) for i in ids] == [kept.id_to_token(i) if i >= 0 else None for i in ids]
    for text in ("<s>", "a", "nope"):
        assert transient.token_to_id(text) == kept.token_to_id(text)


@given(text=TEXTS, flags=st.tuples(st.booleans(), st.booleans()))
@settings(max_examples=12, deadline=None)
def test_tokens_are_the_same_after_each_rest(
    pair: tuple[Tokenizer, TransientTokenizer], text: str, flags: tuple[bool, bool]
) -> None:
    kept, transient = pair
    ids = kept.encode(text, *flags)
    transient.rest()
    assert transient.encode(text, *flags) == ids


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_text_is_the_same(pair: tuple[Tokenizer, TransientTokenizer], data: st.DataObject, skip: bool) -> None:
    kept, transient = pair
    ids = data.draw(st.lists(st.integers(0, kept.vocab_size + 3), max_size=30))
    transient.rest()
    assert transient.decode(ids, skip_special_tokens=skip) == kept.decode(ids, skip_special_tokens=skip)
    one, other = StreamDecoder(kept, ids[:3]), StreamDecoder(transient, ids[:3])
    assert [one.push(i) for i in ids[3:]] + [one.flush()] == [other.push(i) for i in ids[3:]] + [other.flush()]


def test_room_is_made_before_each_parse_and_only_then(path: Path) -> None:
    transient = TransientTokenizer.from_file(path)
    parses: list[int] = []
    transient.before_parsing = lambda: parses.append(1)
    transient.encode("a")  # what loading parsed is still there
    transient.rest()
    transient.rest()
    transient.decode([0, 1, 2])
    assert parses == []
    transient.encode("a")
    transient.encode("b")
    assert len(parses) == 1
    transient.rest()
    transient.encode("a")
    assert len(parses) == 2


def test_threads_may_rest_and_encode_at_once(path: Path) -> None:
    transient = TransientTokenizer.from_file(path)
    expected = transient.encode(SENTENCES[0])

    def work(rests: bool) -> bool:
        for _ in range(30):
            if rests:
                transient.rest()
            elif transient.encode(SENTENCES[0]) != expected or transient.decode(expected) != SENTENCES[0]:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [True, False] * 2))


def test_a_file_that_changes_meanwhile(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(path.read_bytes())
    transient = TransientTokenizer.from_file(copy)
    transient.rest()
    copy.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(TokenizerError, match="changed"):
        transient.encode("a")
    copy.unlink()
    with pytest.raises(TokenizerError, match="gone"):
        transient.encode("a")
    assert transient.decode([5]) == Tokenizer.from_file(path).decode([5])


def test_only_byte_level_tokenizers_can(path: Path, tmp_path: Path) -> None:
    assert tokenizer_facts(path).can_rest and tokenizer_facts(resolve(None) / "tokenizer.json").can_rest
    other = tokenizers.Tokenizer(models.WordLevel({"a": 0, '"decoder":{"type":"ByteLevel"': 1, "[u]": 2}, "[u]"))
    other.save(str(tmp_path / "other.json"))
    assert not tokenizer_facts(tmp_path / "other.json").can_rest
    with pytest.raises(TokenizerError, match="byte-level"):
        TransientTokenizer.from_file(tmp_path / "other.json")
    (tmp_path / "empty.json").write_bytes(b"")
    assert not tokenizer_facts(tmp_path / "empty.json").can_rest
    assert not tokenizer_facts(tmp_path / "missing.json").can_rest


_MEASURED = """
import sys
import tokenizers
from pathlib import Path
from edgeinfer.runtime.system.memory import process_memory, release_freed, return_large_frees
from edgeinfer.runtime.text import TransientTokenizer
return_large_frees()
tokenizers.Tokenizer(tokenizers.models.BPE()).encode("a")
release_freed()
before = process_memory()
tokenizer = TransientTokenizer.from_file(sys.argv[1])
release_freed()
kept = process_memory().anonymous - before.anonymous
resting = []
for _ in range(5):
    tokenizer.rest()
    resting.append(process_memory().anonymous - before.anonymous)
    tokenizer.encode("a b c d e f g")
# What the table takes; holes in what was freed, which are not the same each time, come on top.
print(kept, min(resting), process_memory().peak_rss - before.rss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
@pytest.mark.parametrize("tokens", [4_000, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pairs", [True, False])
def test_bounds_hold_and_rest_saves(tmp_path: Path, tokens: int, pairs: bool) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, tokens)
    if not pairs:
        tokenizer = json.loads(path.read_text("utf-8"))
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
        path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    assert tokenizer_facts(path).merge_pairs is pairs
    command = [sys.executable, "-c", _MEASURED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIME_LIMIT)
    kept, resting, peak = map(int, done.stdout.split())
    size = path.stat().st_size
    assert kept <= kept_bytes(tokens)
    assert resting <= table_bytes(size, tokens)
    assert peak <= parsing_bytes(size, tokens, pairs=pairs)
    if tokens > 10_000:
        assert resting < 0.25 * kept
        assert peak > 0.6 * parsing_bytes(size, tokens, pairs=pairs)
