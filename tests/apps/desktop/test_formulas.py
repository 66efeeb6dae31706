"""Formulas in replies: what is one and what is not, untouched by Markdown, whole or still being written."""

from __future__ import annotations

import re
from html import unescape

from edgeinfer.apps.desktop.markdown import render_reply, render_user

_MATH = re.compile(r'<span class="(math|math display)">(.*?)</span>', re.DOTALL)
INLINE, SHOWN = "math", "math display"

# Text, and its formulas as the page is given them.
FORMULAS: dict[str, list[tuple[str, str]]] = {
    "The area is $\\pi r^2$.": [(INLINE, "$\\pi r^2$")],
    "The area is \\(\\pi r^2\\).": [(INLINE, "\\(\\pi r^2\\)")],
    "\\[ \\int_0^1 x^2\\,dx = \\frac{1}{3} \\]": [(SHOWN, "\\[ \\int_0^1 x^2\\,dx = \\frac{1}{3} \\]")],
    "$$E = mc^2$$": [(SHOWN, "$$E = mc^2$$")],
    "So $$a$$ holds": [(SHOWN, "$$a$$")],
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
        (SHOWN, "$$\na\n= b\n- c\n+ d\n# e\n> f\n---\n    g\n|h|\n|-|\n$$")
    ],
    "We have: \\[\nx\n= 0\n\\] and so on": [(SHOWN, "\\[\nx\n= 0\n\\]")],
    "\\[\n\na\n\n\\]": [(SHOWN, "\\[\n\na\n\n\\]")],
    "\\begin{align*} a &= b \\\\ c &= d \\end{align*}": [(SHOWN, "\\begin{align*} a &= b \\\\ c &= d \\end{align*}")],
    "\\begin{equation}\na\n\\end{equation}": [(SHOWN, "\\begin{equation}\na\n\\end{equation}")],
    "$$\\begin{cases} a & b \\\\ c & d \\end{cases}$$": [(SHOWN, "$$\\begin{cases} a & b \\\\ c & d \\end{cases}$$")],
    # In other things.
    "# A $x$": [(INLINE, "$x$")],
    "**$x$** *$y_1$* ~~$z$~~": [(INLINE, "$x$"), (INLINE, "$y_1$"), (INLINE, "$z$")],
    "- $a$\n- \\(b\\)\n  - $$c$$": [(INLINE, "$a$"), (INLINE, "\\(b\\)"), (SHOWN, "$$c$$")],
    "1. One\n   \\[\n   x\n   \\]\n2. Two": [(SHOWN, "\\[\n   x\n   \\]")],
    "- [x] $a$": [(INLINE, "$a$")],
    "> $a$\n> $$\n> b\n> $$": [(INLINE, "$a$"), (SHOWN, "$$\nb\n$$")],
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
