"""A checkpoint's tokenizer is written as devices parse it in least memory, and stays the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.synthetic import pseudo_text, write_tokenizer
from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.export.source.sidecar import read_sidecar
from edgeinfer.runtime.text import Tokenizer, tokenizer_facts
from tests.tables import each_row

CONFIG = HFConfig({"bos_token_id": 1, "eos_token_id": 2})


def written(folder: Path) -> bytes:
    return read_sidecar(folder, CONFIG).files["tokenizer.json"]


def change(folder: Path, **model: Any) -> bytes:
    """Sets fields of the tokenizer's model; gives the file as it then is."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["model"] |= model
    path.write_text(json.dumps(tokenizer), "utf-8")
    return path.read_bytes()


def test_pairs_become_texts_and_the_tokenizer_stays_the_same(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 3000)
    (tmp_path / "lean.json").write_bytes(written(tmp_path))
    assert tokenizer_facts(tmp_path / "tokenizer.json").merge_pairs
    assert not tokenizer_facts(tmp_path / "lean.json").merge_pairs
    theirs, ours = (Tokenizer.from_file(tmp_path / name) for name in ("tokenizer.json", "lean.json"))
    for text in (pseudo_text(500), "Grüße, 世界!  \n\t <|im_end|> don't", ""):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids)
    before, after = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("tokenizer.json", "lean.json"))
    assert [" ".join(pair) for pair in before["model"].pop("merges")] == after["model"].pop("merges")
    assert before == after


@each_row("merges", [[], ["a b"], [["a", " b"]], [["a", "b", "c"]], [["a", 1]], None])
def test_what_cannot_be_texts_stays_as_it_is(tmp_path: Path, merges: Any) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    data = change(tmp_path, merges=merges)
    assert written(tmp_path) == data


def test_half_of_a_surrogate_pair_stays_as_it_was_written(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    data = change(tmp_path, unk_token="\ud800")
    assert written(tmp_path) == data
