"""Stories and prompts of the benchmarks: categories, draws that repeat, and cuts that are counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.bench.texts import Prompt, all_stories, builtin_prompts, load_prompts, tokenize_prompts
from edgeinfer.core.errors import PromptError, TemplateError, UsageError

ROWS: dict[str, list[dict[str, Any]]] = {
    "tales_dialogues/dialogues.jsonl": [
        {"kind": kind, "messages": [{"role": "user", "content": f"{kind} {number}\u2028"}]}
        for number in range(5)
        for kind in ("write", "retell")
    ],
    "mtbench/question.jsonl": [{"question_id": 81, "category": "writing", "turns": ["first", "second"]}],
    "specbench/question.jsonl": [
        {"question_id": number, "category": ("qa", "rag")[number % 2], "turns": [f"question {number}"]}
        for number in range(6)
    ],
    "gsm8k/train.jsonl": [{"question": f"sum {number}", "answer": "4"} for number in range(20)],
    "summarization/cnn_dailymail.jsonl": [{"prompt": "Summarise this", "completion": "short"}],
    "summarization/samsum.jsonl": [{"prompt": "Summarise that", "completion": "short"}],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder


class WordModel:
    """Counts words as tokens; may lack a chat template."""

    def __init__(self, context: int, template: bool = True) -> None:
        self.context = context
        self._template = template

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return list(range(100, 100 + len(text.split())))

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if not self._template:
            raise TemplateError("No template.")
        return list(range(sum(len(message["content"].split()) for message in messages)))


def test_every_data_set_gives_its_categories(data: Path) -> None:
    prompts = load_prompts(data, 100)
    assert Counter(prompt.category for prompt in prompts) == {
        "tales/write": 5,
        "tales/retell": 5,
        "mtbench": 1,
        "specbench/qa": 3,
        "specbench/rag": 3,
        "gsm8k": 20,
        "summarization/cnn": 1,
        "summarization/samsum": 1,
    }
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    questions = {prompt.category: prompt.messages[0]["content"] for prompt in prompts}
    assert questions["mtbench"] == "first"
    assert questions["summarization/samsum"] == "Summarise that"
    assert questions["tales/write"].endswith("\u2028")


def test_draws_repeat_and_grow(data: Path) -> None:
    few, more = (load_prompts(data, count, categories=["gsm8k"]) for count in (4, 9))
    assert few == load_prompts(data, 4, categories=["gsm8k"])
    assert (len(few), len(more)) == (4, 9)
    assert {prompt.name for prompt in few} < {prompt.name for prompt in more}


def test_categories_are_chosen_by_name_or_source(data: Path) -> None:
    chosen = load_prompts(data, 1, categories=["specbench", "tales/retell"])
    assert [prompt.category for prompt in chosen] == ["tales/retell", "specbench/qa", "specbench/rag"]
    with pytest.raises(PromptError, match="poetry"):
        load_prompts(data, 1, categories=["poetry"])


def test_a_folder_without_prompts_or_with_damaged_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="holds no prompts"):
        load_prompts(tmp_path, 1)
    (tmp_path / "gsm8k").mkdir()
    for text in ("{", '{"answer": 4}', "[]"):
        (tmp_path / "gsm8k" / "train.jsonl").write_text(text + "\n")
        with pytest.raises(PromptError, match=r"train\.jsonl"):
            load_prompts(tmp_path, 1)


def test_long_prompts_are_cut_at_the_front_and_say_so() -> None:
    plain: Any = WordModel(200, template=False)
    (first, *_) = tokenize_prompts(plain, builtin_prompts(1, ["tales/write"]), max_tokens=10)
    assert first.ids[0] == 100, "a model without a template reads the messages as text"
    short, long = (
        Prompt("a", name, ({"role": "user", "content": "x " * length},)) for name, length in (("s", 5), ("l", 90))
    )
    items = tokenize_prompts(WordModel(50), [short, long], 10)  # type: ignore[arg-type]
    assert [(len(item.ids), item.cut) for item in items] == [(5, 0), (40, 50)]
    assert items[1].ids[-1] == 89
    with pytest.raises(PromptError, match="fill the context"):
        tokenize_prompts(WordModel(50), [short], 50)  # type: ignore[arg-type]


def test_stories_of_a_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one<|endoftext|>two <|endoftext|>\n three<|endoftext|>\n", "utf-8")
    assert all_stories(path) == ["one", "two", "three"]
    path.write_text(" ", "utf-8")
    with pytest.raises(UsageError, match="no stories"):
        all_stories(path)
    with pytest.raises(UsageError, match="Cannot read"):
        all_stories(tmp_path / "none")
