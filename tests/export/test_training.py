"""The recipe of the small mixture-of-experts model: what it reads, what it leaves out, what it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from edgeinfer.errors import UsageError
from edgeinfer.export.training.text import SEPARATOR
from tests.recorded import check_recorded
from tests.tables import each_row
from tests.tools.dialogues import read_stories
from tests.tools.research import tales_moe
from tests.tools.research.tales_moe import make_tokenizer, split_stories, tokens_of

STORIES = [f"Once there was a dog number {i}. It ran and ran {i * i} times." for i in range(120)]


def write_stories(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.txt").write_text(f"\n{SEPARATOR}\n".join(STORIES[:70]), "utf-8")
    lines = [json.dumps({"text": story}) for story in STORIES[60:]]
    (folder / "b.jsonl").write_text("\n".join(lines), "utf-8")
    (folder / "notes.md").write_text("not a story", "utf-8")
    return folder


def test_stories_are_read_once_and_excluded_ones_never(tmp_path: Path) -> None:
    folder = write_stories(tmp_path / "stories")
    assert sorted(read_stories(folder)) == sorted(STORIES)
    excluded = tmp_path / "excluded.json"
    excluded.write_text(json.dumps(["Once there was a dog number 7."]), "utf-8")
    assert sorted(read_stories(folder, excluded)) == sorted(s for s in STORIES if "number 7." not in s)


def test_held_out_stories_are_not_trained_on() -> None:
    seen, held_out = split_stories(STORIES)
    assert sorted(seen + held_out) == sorted(STORIES)
    assert len(held_out) == 3


def test_tokens_give_the_stories_back() -> None:
    tokenizer = make_tokenizer(STORIES, 300)
    tokens = tokens_of(STORIES[:2], tokenizer)
    assert tokens[0] == tokenizer.token_to_id(SEPARATOR) == 0
    assert tokenizer.decode(tokens[1:].tolist()) == f"{STORIES[0]}{STORIES[1]}"


@each_row("content", ["", "[not json", '{"other": 1}'])
def test_folders_without_stories_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content, "utf-8")
    with pytest.raises(UsageError):
        read_stories(tmp_path)


def test_recipe_makes_a_checkpoint_that_has_learned(tmp_path: Path) -> None:
    sizes = {"vocabulary": 300, "hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_size": 16, "experts": 3}
    recipe = tales_moe.Recipe(**sizes, top_k=2, expert_size=16, steps=120, batch=4, context=16)
    out = tmp_path / "out"
    tales_moe.make_checkpoint(recipe, read_stories(write_stories(tmp_path / "stories")), out)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    assert Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size() == 300
    record = json.loads((out / "recipe.json").read_text())
    assert 1 < record["held_out_perplexity"] < 100  # of 300 tokens
    assert record["stories"] == 117
    check_recorded("tales-moe", {name: record[name] for name in record if "seconds" not in name}, rel=2e-2)
