"""Prompts with a gap, for models whose vocabulary has tokens that mark it, in the form of llama.cpp's server."""

from __future__ import annotations

from typing import Any

from edgeinfer.core.records import dataclass
from edgeinfer.openai.contract import ChatModel
from edgeinfer.openai.errors import RequestError

# How vocabularies spell what stands before the prefix, the suffix and the reply, of one makers' models in a line.
_GAPS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_REPOSITORIES = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>", "<REPO>")
_FILES = ("<|file_sep|>", "<filename>")
_PADS = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>")
# Most tokens of prefix and suffix together, of which a quarter is the suffix's.
_NEAR = 2048


@dataclass(frozen=True)
class Gap:
    """What stands around a gap, and further texts, with their names, that stand before all."""

    prefix: str
    suffix: str
    started: str = ""  # the beginning of what fills it
    others: tuple[tuple[str, str], ...] = ()

    def ids(self, model: ChatModel[Any], field: str = "suffix") -> tuple[list[int], list[int]]:
        """The tokens of the prompt, and those that end the reply besides the model's own; refuse a model that has none
        for a gap. What is furthest from the gap is left out where there is no room."""
        all_marks = ([_mark(model, name) for name in names] for names in _GAPS)
        marks = next(filter(all, all_marks), None)
        if marks is None:
            message = f"{model.info.name} continues text; it cannot fill in the middle."
            hint = "Use a model for code, such as Qwen2.5-Coder."
            raise RequestError(message, hint, param=field, code="unsupported_parameter")
        near = min(_NEAR, model.context // 2)
        before, started, after = (_plain(model, text) for text in (self.prefix, self.started, self.suffix))
        before, after = _last(before, 3 * near // 4), after[: max(near // 4 - 2 - len(started), 0)]
        (before_mark,), (after_mark,), (reply_mark,) = marks
        context, ends = self._context(model)
        ids = [*_last(context, model.context - 2 * near), *model.begin_ids]
        return [*ids, before_mark, *before, *started, after_mark, *after, reply_mark], ends

    def _context(self, model: ChatModel[Any]) -> tuple[list[int], list[int]]:
        repository, file = (_first(model, names) for names in (_REPOSITORIES, _FILES))
        ids = [*repository, *_plain(model, "myproject\n")] if repository else []
        for name, text in self.others:
            ids += [*file, *_plain(model, f"{name}\n")] if file else _plain(model, "\n\n--- snippet ---\n\n")
            ids += _plain(model, text)
        ids += [*file, *_plain(model, "filename\n")] if file else []
        return ids, [*repository, *file, *_first(model, _PADS)]


def _first(model: ChatModel[Any], names: tuple[str, ...]) -> list[int]:
    return next((found for name in names if (found := _mark(model, name))), [])


def _mark(model: ChatModel[Any], name: str) -> list[int]:
    """The one token that a text is; empty where it is several."""
    ids = model.tokenize(name, add_special=False)
    return ids if len(ids) == 1 else []


def _plain(model: ChatModel[Any], text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=False) if text else []


def _last(ids: list[int], most: int) -> list[int]:
    return ids[max(len(ids) - most, 0) :] if most > 0 else []
