"""What hostile text costs: ten times as much of it takes about ten times the work, counted in calls and in HTML."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from html import unescape
from types import FrameType
from typing import Any

import pytest

from edgeinfer.apps.desktop import markdown
from edgeinfer.apps.desktop.markdown import LANGUAGES, highlighted, render_reply, render_user
from tests.tables import each_row

SMALL, LARGE, LARGEST = 600, 6_000, 60_000
# A call is made for every few characters at most, times the levels of nesting.
CALLS_PER_CHARACTER, HTML_PER_CHARACTER = 160, 60
UNITS = [
    *("[", "![", "[a](", "[a][", "[`", "](", "[]", "[[]", "![](", "[a](<b", "[a]: <", "[^", "[\n", "[a]\n"),
    *("*", "_", "**a ", "*a_ ", "***a **b *c ", "a**b", "~~a ", "`", "``a", "\\", "&", "&#", "&#x", "&amp", "<", "<a:"),
    *("<a@a.", "<!--", "<?", "http://a ", "> ", ">", "- ", "-\n", "1.\n", "# ", "=\n", "a\n", "a  \n", " ", "\t", "\n"),
    *("    a\n", "|", "|a", "|\n", "|a|\n|-|\n", "```\n", "~~~a\n", "<think>", "[a]: /u\n", "\x00", "\ufeff", "é"),
    *("$", "$$", "$a", "$a$", "$$a$$", "$1 ", "\\(", "\\[", "\\(a\\)", "\\begin{align}", "$`", "](", "\ue0000\ue001"),
    *("$$\n\n", "[^1]", "[^a]: x\n", "[^a]: x\n\n", "^[", "- [ ] a\n", "https://a.b/", "https://", "a.b@c.d "),
]
WHOLE: list[Callable[[int], str]] = [
    lambda n: "[" * (n // 2) + "]" * (n // 2),
    lambda n: "[" * (n // 8) + "a" + "](b)" * (n // 8),
    lambda n: "|a" * (n // 4) + "|\n" + "|-" * (n // 4) + "|\n" + "|\n" * (n // 4),
    lambda n: "|a" * 30 + "|\n" + "|-" * 30 + "|\n" + "|\n" * (n // 2),
    lambda n: "".join(f"[a{i}]: /u\n" for i in range(n // 10)),
    lambda n: "[a]: " + "x" * (n // 2) + "\n\n" + "[a]" * (n // 6),
    lambda n: "> a\n" + "b\n" * (n // 2),
    lambda n: "".join(" " * i + "- a\n" for i in range(int((2 * n) ** 0.5))),
    lambda n: "".join("e" + "`" * i for i in range(int((2 * n) ** 0.5))),
    lambda n: "**a " * (n // 8) + "b** " * (n // 8),
    lambda n: '[a]: b "' + "\n" * n,
]
CODE = [
    *('"', "'", "`", '"""', "'''", "/*", "//", "<!--", "<", "<a ", "</", "{", "(", "[", "#", "\\", '\\"', "$", "${"),
    *("m{", "s{", "q(", "<<A\n", "@", "%", "=", "- ", "--", "a", "a ", "a.", "a:", "a:\n", "a = ", "\n", " ", "0"),
    *("&", "&a", "&#", "*", "/* *", "a::", "a<", "((a)", "def ", "[[", "a\\\n", "@@", '<a b="', '="', "='", "<!-", "+"),
]  # fmt: skip


def calls(work: Callable[[], Any]) -> int:
    """How many functions some work calls, C functions included."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    markdown._coloured.cache_clear()


def check_growth(show: Callable[[str], str], *, every: int = 1) -> None:
    small, large = SMALL, LARGE
    texts: list[tuple[object, Callable[[int], str]]] = [*enumerate(WHOLE)]
    texts += [(unit, partial(_repeated, unit)) for unit in UNITS]
    for said, text in texts[::every]:
        few, many = (calls(partial(show, text(n))) for n in (small, large))
        assert many <= 1.5 * large / small * few + 1_000, said
        assert many <= CALLS_PER_CHARACTER * large, said
        assert len(show(text(large))) <= HTML_PER_CHARACTER * large, said


def _repeated(unit: str, length: int) -> str:
    return (unit * length)[:length]


def test_hostile_markdown_costs_what_its_length_says() -> None:
    check_growth(render_reply, every=5)


@pytest.mark.slow
def test_hostile_text_of_the_largest_size() -> None:
    check_growth(render_reply)
    check_growth(render_user, every=4)  # its blocks are a few of those of replies
    texts: list[Callable[[int], str]] = [*WHOLE, partial(_repeated, "["), partial(_repeated, "![](")]
    for text in texts:
        assert calls(partial(render_reply, text(LARGEST))) <= CALLS_PER_CHARACTER * LARGEST


def test_hostile_code_costs_what_its_length_says() -> None:
    for unit in CODE:
        for name in ("python", "html", "yaml"):
            assert calls(partial(highlighted, _repeated(unit, LARGE), name)) <= 12 * LARGE, (name, unit)
    for name, language in LANGUAGES.items():
        # Within a match no call is counted: its repetitions must give nothing back, or they would look again.
        outside_sets = re.sub(r"\[(?:\\.|[^\]\\])*\]|\\.", "x", language.pattern.pattern)
        assert not set("*+{") & set(re.sub(r"[*+?]\+", "", outside_sets)), name


def test_only_known_languages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "m{" * 9_000
    assert render_reply(f"```brainfuck\n{code}\n```").count("<span") == 1  # its name
    monkeypatch.setattr(markdown, "LANGUAGES", {})
    assert render_reply("```python\nif x: pass\n```").count("<span") == 1


@each_row(
    ("language", "code", "shown"),
    [
        ("python", "def f(x): # no\n    return 'a'", {"k": ["def", "return"], "nf": ["f"], "c": ["# no"]}),
        ("js", "const a = `x${1}`; // y", {"k": ["const"], "s": ["`x${1}`"], "c": ["// y"]}),
        ("c", "#include <a.h>\nint x = 0x1F; /* b\nc */", {"cp": ["#include"], "nb": ["int"], "m": ["0x1F"]}),
        ("json", '{"a": "b", "c": true}', {"na": ["&quot;a&quot;", "&quot;c&quot;"], "kc": ["true"]}),
        ("yaml", "a: b # c\n", {"na": ["a"], "c": ["# c"]}),
        ("html", '<p class="x">it\'s</p>', {"nt": ["&lt;p", "&gt;", "&lt;/p", "&gt;"], "na": ["class"]}),
        ("sql", "SELECT a FROM b -- c", {"k": ["SELECT", "FROM"], "c": ["-- c"]}),
        ("bash", "for f in $A; do echo ${B}; done", {"k": ["for", "in", "do", "done"], "no": ["$A", "${B}"]}),
        ("diff", "@@ a\n-b\n+c\n d", {"gu": ["@@ a"], "gd": ["-b"], "gi": ["+c"]}),
        ("Rust", "fn f<'a>(x: &'a str) {}", {"k": ["fn"], "nb": ["str"]}),
    ],
)
def test_what_is_coloured(language: str, code: str, shown: dict[str, list[str]]) -> None:
    html = highlighted(code, language)
    for name, texts in shown.items():
        assert re.findall(f'<span class="{name}">(.*?)</span>', html, re.DOTALL) == texts, html
    assert unescape(re.sub("<[^>]*>", "", html)) == code
