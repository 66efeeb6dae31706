"""Messages as HTML: Markdown and formulas, and that nothing hostile becomes markup."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.apps.desktop import markdown
from edgeinfer.apps.desktop.markdown import render_reply, render_user
from tests.tables import each_row

SHOWN = {
    *("a", "blockquote", "br", "button", "code", "del", "details", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6"),
    *("hr", "input", "li", "ol", "p", "pre", "s", "span", "strong", "summary", "sup", "table", "tbody", "td", "th"),
    *("thead", "tr", "ul"),
}
ATTRIBUTES = {
    "a": {"href", "title", "rel", "target"},
    "button": {"class"},
    "details": {"class", "open"},
    "div": {"class"},
    "input": {"class", "checked", "disabled", "type"},
    "li": {"class"},
    "ol": {"class", "start"},
    "p": {"class"},
    "span": {"class"},
    "sup": {"class"},
    "ul": {"class"},
    "td": {"class"},
    "th": {"class"},
}
FRAGMENTS = [
    *("<script>", "</script>", "<img src=x onerror=alert(1)>", "![a](", "[a](", ")", "javascript:", "data:text/html,"),
    *("`", "```", "```html\n", "\n", "\n\n", "    ", "<", ">", '"', "'", "&", "&#x3c;", "|", "|-|\n", "[x]: ", "\\"),
    *("http://a/", "onload=", "*", "_", "~~", "<think>", "</think>", "> ", "- ", "1. ", "# ", "\x00", "é", "\t"),
    *("$", "$$", "\\(", "\\)", "\\[", "\\]", "\\begin{align}", "\ue000", "\ue001", "%EE%80%80", "0", "[^1]"),
    *("[^1]: ", "[ ] "),
]


class Checker(HTMLParser):
    """Notes whatever a page must not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in SHOWN:
            self.wrong.append(tag)
        for name, value in attrs:
            if name not in ATTRIBUTES.get(tag, set()):
                self.wrong.append(f"{tag} {name}")
            if name == "href" and not re.match(r"(?i)https?://|mailto:", value or ""):
                self.wrong.append(f"{tag} {name}={value}")

    def handle_comment(self, data: str) -> None:
        self.wrong.append(f"comment {data}")

    def handle_decl(self, decl: str) -> None:
        self.wrong.append(f"declaration {decl}")


def wrong_in(html: str) -> list[str]:
    checker = Checker()
    checker.feed(html)
    checker.close()
    return checker.wrong


def test_what_people_expect() -> None:
    html = render_reply("# Title\n\n*a* **b** ~~c~~ `d`\n\n1. x\n2. y\n\n|l|r|\n|-|-:|\n|1|2|\n")
    for part in ("<h1>Title</h1>", "<em>a</em>", "<strong>b</strong>", "<s>c</s>", "<code>d</code>", "<ol>"):
        assert part in html
    assert '<td class="align-right">2</td>' in html
    assert wrong_in(html) == []


def test_code_has_a_head_and_colours() -> None:
    assert render_reply("```py title\nprint('<b>')\n```") == (
        '<div class="code"><div class="code-head"><span class="lang">py</span><button class="copy">Copy</button></div>'
        '<pre><code><span class="nb">print</span>(<span class="s">&#x27;&lt;b&gt;&#x27;</span>)\n</code></pre></div>\n'
    )
    assert "<code>&lt;i&gt;\n</code>" in render_reply("```nonsense\n<i>\n```")
    assert "<code>indented &amp;\n</code>" in render_reply("    indented &\n")
    # While it is being written, too.
    assert '<span class="lang">c</span>' in render_reply("```c\nint x")


def test_task_lists_bare_links_and_footnotes() -> None:
    tasks = render_reply("- [ ] a\n- [x] b\n- [] c\n\n1. [X] d\n")
    assert tasks.count('<input class="task-list-item-checkbox" disabled="disabled" type="checkbox"> a') == 1
    assert tasks.count('checked="checked" disabled="disabled" type="checkbox">') == 2
    assert "<li>[] c</li>" in tasks
    html = render_reply("See https://a.b/c_d_(e)?f=1&g=2. Not main.py, a.b or `http://code.x`; [one](http://x.y).")
    address = "https://a.b/c_d_(e)?f=1&amp;g=2"
    assert f'See <a href="{address}" rel="noopener noreferrer" target="_blank">{address}</a>.' in html
    assert html.count("<a ") == 2
    html = render_reply("One[^1] and two[^b], none[^c].\n\n[^1]: First *note*.\n[^b]: Second.\n")
    assert 'One<sup class="footnote">1</sup> and two<sup class="footnote">2</sup>, none[^c].' in html
    assert html.endswith(
        '<ol class="footnotes">\n<li><p>First <em>note</em>.</p>\n</li>\n<li><p>Second.</p>\n</li>\n</ol>\n'
    )
    for text in (tasks, html):
        assert wrong_in(text) == []


def test_links_lead_out_and_pictures_are_links() -> None:
    assert render_reply("[a](https://x.y 'T') <mailto:a@b.c>") == (
        '<p><a href="https://x.y" title="T" rel="noopener noreferrer" target="_blank">a</a> '
        '<a href="mailto:a@b.c" rel="noopener noreferrer" target="_blank">mailto:a@b.c</a></p>\n'
    )
    html = render_reply('![pic](http://evil/x.png "t") ![](http://evil/y.png)')
    assert "<img" not in html
    assert '<a href="http://evil/x.png" rel="noopener noreferrer" target="_blank">pic</a>' in html
    assert ">http://evil/y.png</a>" in html


@each_row(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](&#106;avascript:alert(1))",
        "[a](data:text/html;base64,PHNjcmlwdD4=)",
        "[a](vbscript:x) [b](file:///etc/passwd) [c](//evil) [d](/app/api/state) [e](#x)",
        "![x](javascript:alert(1))",
        '![" onerror="alert(1)](http://a/)',
        '[a](http://a/"onmouseover="alert(1))',
        "<javascript:alert(1)>",
        "<!-- x --> <!DOCTYPE x> <?php ?>",
        '```"><script>alert(1)</script>\nx\n```',
        "[a]: javascript:alert(1)\n\n[a]",
        "<think><script></think><script>",
        "<svg/onload=alert(1)>",
        "[a\n](http://a/\n)",
        '<a href="http://x" onclick="y">z</a>',
        "|<script>|\n|-|\n|<b>|",
        "![a]()",
        "[a]()",
    ],
)
def test_hostile_text_stays_text(text: str) -> None:
    assert wrong_in(render_reply(text)) == []
    assert wrong_in(render_user(text)) == []


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_no_text_becomes_markup_of_its_own(text: str) -> None:
    assert wrong_in(render_reply(text)) == []
    assert wrong_in(render_user(text)) == []


def test_what_people_type_is_shown_as_typed() -> None:
    assert render_user("# include <x>\n*no* [a](b)\n\n`code`") == (
        "<p># include &lt;x&gt;<br>\n*no* [a](b)</p>\n<p><code>code</code></p>\n"
    )
    assert '<span class="lang">js</span>' in render_user("```js\nlet a\n```")


def test_thoughts_are_folded() -> None:
    assert render_reply("<think>\nhm *a*\n</think>\n\nYes") == (
        '<details class="thinking"><summary>Thinking</summary><p>hm <em>a</em></p>\n</details><p>Yes</p>\n'
    )
    assert '<details class="thinking" open>' in render_reply("<think>still at it")


def test_very_long_text_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "_MOST_RENDERED", 10)
    assert render_reply("*" * 11) == '<p class="plain">***********</p>\n'
    assert render_user("<" * 11).count("&lt;") == 11
    monkeypatch.setattr(markdown, "_MOST_RENDERED", 1000)
    monkeypatch.setattr(markdown, "_MOST_HIGHLIGHTED", 3)
    assert '<span class="n' not in render_reply("```py\nvery_long = 1\n```")


_MATH = re.compile(r'<span class="(math|math display)">(.*?)</span>', re.DOTALL)
INLINE, BLOCK = "math", "math display"

# Text, and its formulas as the page is given them.
FORMULAS: dict[str, list[tuple[str, str]]] = {
    "The area is $\\pi r^2$.": [(INLINE, "$\\pi r^2$")],
    "The area is \\(\\pi r^2\\).": [(INLINE, "\\(\\pi r^2\\)")],
    "\\[ \\int_0^1 x^2\\,dx = \\frac{1}{3} \\]": [(BLOCK, "\\[ \\int_0^1 x^2\\,dx = \\frac{1}{3} \\]")],
    "$$E = mc^2$$": [(BLOCK, "$$E = mc^2$$")],
    "So $$a$$ holds": [(BLOCK, "$$a$$")],
    # Markdown's signs inside.
    "$a_1 * b_2 * c_3$ and $d_1 _x_$": [(INLINE, "$a_1 * b_2 * c_3$"), (INLINE, "$d_1 _x_$")],
    "\\(\\{a\\}\\;\\#\\$\\%\\)": [(INLINE, "\\(\\{a\\}\\;\\#\\$\\%\\)")],
    "$\\$5 + \\$6$": [(INLINE, "$\\$5 + \\$6$")],
    '$x < y > z & "q"$': [(INLINE, '$x < y > z & "q"$')],
    "$a ~~b~~ [c](d) ![e](f) <g>$": [(INLINE, "$a ~~b~~ [c](d) ![e](f) <g>$")],
    "\\(a \\\\ b\\)": [(INLINE, "\\(a \\\\ b\\)")],
    "$\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}$": [
        (INLINE, "$\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}$")
    ],
    # Lines that would be a heading, a list, a quotation, a rule, a table or code.
    "$$\na\n= b\n- c\n+ d\n# e\n> f\n---\n    g\n|h|\n|-|\n$$": [
        (BLOCK, "$$\na\n= b\n- c\n+ d\n# e\n> f\n---\n    g\n|h|\n|-|\n$$")
    ],
    "We have: \\[\nx\n= 0\n\\] and so on": [(BLOCK, "\\[\nx\n= 0\n\\]")],
    "\\[\n\na\n\n\\]": [(BLOCK, "\\[\n\na\n\n\\]")],
    "\\begin{align*} a &= b \\\\ c &= d \\end{align*}": [(BLOCK, "\\begin{align*} a &= b \\\\ c &= d \\end{align*}")],
    "\\begin{equation}\na\n\\end{equation}": [(BLOCK, "\\begin{equation}\na\n\\end{equation}")],
    "$$\\begin{cases} a & b \\\\ c & d \\end{cases}$$": [(BLOCK, "$$\\begin{cases} a & b \\\\ c & d \\end{cases}$$")],
    # In other things.
    "# A $x$": [(INLINE, "$x$")],
    "**$x$** *$y_1$* ~~$z$~~": [(INLINE, "$x$"), (INLINE, "$y_1$"), (INLINE, "$z$")],
    "- $a$\n- \\(b\\)\n  - $$c$$": [(INLINE, "$a$"), (INLINE, "\\(b\\)"), (BLOCK, "$$c$$")],
    "1. One\n   \\[\n   x\n   \\]\n2. Two": [(BLOCK, "\\[\n   x\n   \\]")],
    "- [x] $a$": [(INLINE, "$a$")],
    "> $a$\n> $$\n> b\n> $$": [(INLINE, "$a$"), (BLOCK, "$$\nb\n$$")],
    "|a|b|\n|-|-|\n|$|x|$|\\(y\\)|": [(INLINE, "$|x|$"), (INLINE, "\\(y\\)")],
    "[$x$ here](http://a.b/)": [(INLINE, "$x$")],
    "A note[^1]\n\n[^1]: $x$": [(INLINE, "$x$")],
    "<think>$a$</think>\\(b\\)": [(INLINE, "$a$"), (INLINE, "\\(b\\)")],
    # What stands next to it.
    'the $n$th, $k$-means, ($a$), "$b$", $c$.': [(INLINE, f"${name}$") for name in "nkabc"],
    "$1$ and $2x$, $3 \\times 4$": [(INLINE, "$1$"), (INLINE, "$2x$"), (INLINE, "$3 \\times 4$")],
    "$ x = 2 $": [(INLINE, "$ x = 2 $")],
    "It costs $5, so $x = 5$.": [(INLINE, "$x = 5$")],
    "\\$5, \\$6 and $x$": [(INLINE, "$x$")],
    "`$a$` $b$ ``c ` $d$`` $e$": [(INLINE, "$b$"), (INLINE, "$e$")],
    "```\n$a$\n```\n$b$": [(INLINE, "$b$")],
    "Über $\\alpha$ und ü$x$": [(INLINE, "$\\alpha$")],
    "\ue0000\ue001 $x$ \ue0005\ue001": [(INLINE, "$x$")],
}
# Text without any, and what the page shows of it.
NONE = {
    "It costs $5 and $10.": "<p>It costs $5 and $10.</p>",
    "$5, $6 or US$7 (A$8)": "<p>$5, $6 or US$7 (A$8)</p>",
    "$5-$10, $5/$6, $1.50–$2": "<p>$5-$10, $5/$6, $1.50–$2</p>",
    "from $5 million to 6$": "<p>from $5 million to 6$</p>",
    "5$ and 6$": "<p>5$ and 6$</p>",
    "Set $HOME and $PATH, $A:$B": "<p>Set $HOME and $PATH, $A:$B</p>",
    "$ x $ and $\n": "<p>$ x $ and $</p>",
    "$a\n\nb$": "<p>$a</p>\n<p>b$</p>",
    "Kill $$ is the process": "<p>Kill $$ is the process</p>",
    "$$$$ and $$$": "<p>$$$$ and $$$</p>",
    "`\\(a\\)` and `$b$`": "<p><code>\\(a\\)</code> and <code>$b$</code></p>",
    "\\\\(a\\\\)": "<p>\\(a\\)</p>",
    "\\[x](y)": "<p>[x](y)</p>",
    "see https://a.b/$x$/c": (
        '<p>see <a href="https://a.b/$x$/c" rel="noopener noreferrer" target="_blank">https://a.b/$x$/c</a></p>'
    ),
    "[a](http://b.c/$x$ 'T')": (
        '<p><a href="http://b.c/$x$" title="T" rel="noopener noreferrer" target="_blank">a</a></p>'
    ),
}
# While it is being written it is text; the last is whole.
GROWING = [
    ("So \\(", "<p>So \\(</p>"),
    ("So \\(f(x)\\,", "<p>So \\(f(x)\\,</p>"),
    ("So \\(f(x)\\, *y*", "<p>So \\(f(x)\\, *y*</p>"),
    ("So \\(f(x)\\, *y*\\)", '<p>So <span class="math">\\(f(x)\\, *y*\\)</span></p>'),
    ("$$", "<p>$$</p>"),
    ("$$\na\n=", "<p>$$\na\n=</p>"),
    ("$$\na\n= b_1 *c*", "<p>$$\na\n= b_1 *c*</p>"),
    ("$$\na\n= b_1 *c*\n$$", '<p><span class="math display">$$\na\n= b_1 *c*\n$$</span></p>'),
    ("\\[ x [1] \\;", "<p>\\[ x [1] \\;</p>"),
    ("\\begin{align} a &= b", "<p>\\begin{align} a &amp;= b</p>"),
    ("$x_1", "<p>$x_1</p>"),
]


def formulas(html: str) -> list[tuple[str, str]]:
    return [(kind, unescape(source)) for kind, source in _MATH.findall(html)]


def test_formulas_are_found_and_left_as_they_are() -> None:
    for text, wanted in FORMULAS.items():
        html = render_reply(text)
        assert formulas(html) == wanted, text
        assert "\ue000" not in html and "\ue001" not in html, text


def test_other_texts_have_none() -> None:
    for text, wanted in NONE.items():
        assert render_reply(text) == f"{wanted}\n", text
    block = render_reply("    indented $x$\n\n~~~tex\n\\[ y \\]\n\n$z$")
    assert formulas(block) == []
    assert "indented $x$" in block and "\\[ y \\]\n\n$z$" in block
    assert render_user("$x$ *y*") == "<p>$x$ *y*</p>\n"


def test_a_formula_that_is_being_written_is_text() -> None:
    for text, wanted in GROWING:
        assert render_reply(text) == f"{wanted}\n", text


def test_what_is_in_a_formula_never_becomes_markup() -> None:
    html = render_reply('$<img src=x onerror="alert(1)">$ \\[ </span><script>\\] $\\href{javascript:x}{y}$')
    assert "<img" not in html and "<script" not in html and html.count("</span>") == 3
    # Not even by what stands for one.
    assert not re.search("<[^>]* onerror", render_reply('[a](http://b/\ue0000\ue001) $" onerror="x$'))
