"""A checkpoint's tokenizer is written as devices parse it in least memory, and stays the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.export.source.sidecar import read_sidecar
from edgeinfer.runtime.text.tokenizer import Tokenizer, file_has_pairs
from tests.tables import each_row
from tests.tools.random_models import pseudo_text, write_tokenizer

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
    assert file_has_pairs(tmp_path / "tokenizer.json")
    assert not file_has_pairs(tmp_path / "lean.json")
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


def test_what_only_the_settings_say_of_a_tokenizer(tmp_path: Path) -> None:
    """As transformers reads them: classes that compose text, and added tokens, whose flags may differ."""
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    original = (tmp_path / "tokenizer.json").read_bytes()
    size = 1 + max(each["id"] for each in json.loads(original)["added_tokens"])
    flags = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    known = {"content": "<|im_end|>"} | flags
    (end,) = [each["id"] for each in json.loads(original)["added_tokens"] if each["content"] == "<|im_end|>"]
    for name, added in (("Qwen2TokenizerFast", {}), ("Other", {str(end): known, "9000": {"content": "<new>"} | flags})):
        settings = {"tokenizer_class": name, "added_tokens_decoder": added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
        (tmp_path / "made.json").write_bytes(written(tmp_path))
        made = Tokenizer.from_file(tmp_path / "made.json")
        if added:
            ids = made.encode("<|im_end|>  a<new>", add_special_tokens=False)
            assert ids[0] == end and made.decode(ids, skip_special_tokens=False) == "<|im_end|>a<new>"
            assert made.token_to_id("<new>") in made.special_ids and made.token_to_id("<new>") not in range(size)
        else:
            assert made.encode("cafe\u0301") == made.encode("caf\u00e9")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}', "utf-8")
    normalized = json.loads(original) | {"normalizer": {"type": "NFKC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(normalized), "utf-8")
    assert json.loads(written(tmp_path))["normalizer"] == {"type": "NFKC"}
