"""Formulas, task lists and links as a browser shows them."""

from __future__ import annotations

import pytest
from playwright.sync_api import Request, expect

from edgeinfer.apps.desktop.markdown import render_reply
from tests.apps.desktop.browser.window import Window
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.browser]

REPLY = r"""The roots of $ax^2 + bx + c = 0$ cost $5 and are

\[ x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]

- [x] done $\href{javascript:alert(1)}{x}$
- [ ] to do $\frac{1}{$

https://example.invalid/a
"""
# Grows as a reply does; gives how often the first formula was drawn, and what is shown at each step.
GROW = """async (steps) => {
  const { showMarkdown } = await import("/js/markdown.js");
  const { drawFormulas } = await import("/js/formulas.js");
  const target = document.body.appendChild(document.createElement("div"));
  const seen = [];
  const drawn = new Set();
  for (const html of steps) {
    showMarkdown(target, html);
    await drawFormulas(target);
    const formulas = [...target.querySelectorAll(".math")];
    if (formulas[0]?.firstElementChild) drawn.add(formulas[0].firstElementChild);
    seen.push([formulas.length, target.querySelectorAll(".katex").length]);
  }
  target.remove();
  return [drawn.size, seen];
}"""


def test_a_reply_with_formulas_tasks_and_links(window: Window) -> None:
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    window.page.on("request", note)
    window.ask("Hi")
    window.button("Edit").last.click()
    window.page.get_by_role("textbox", name="Edit the reply").fill(REPLY)
    window.button("Save").click()
    text = window.replies.last.locator(".markdown")
    expect(text.locator(".katex")).to_have_count(2)
    expect(text.locator(".math.display .katex-display .mfrac")).to_be_visible()
    # What asks for more than drawing, and what is wrong, stays as it was typed.
    expect(text.locator(".math.failed")).to_have_text([r"$\href{javascript:alert(1)}{x}$", r"$\frac{1}{$"])
    boxes = text.get_by_role("checkbox")
    assert [boxes.nth(n).is_checked() for n in range(boxes.count())] == [True, False]
    expect(boxes.first).to_be_disabled()
    link = text.get_by_role("link")
    assert (link.get_attribute("rel"), link.get_attribute("target")) == ("noopener noreferrer", "_blank")
    assert all(url.startswith(window.page.url.partition("#")[0]) for url in asked)
    window.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text.evaluate("(text) => getSelection().selectAllChildren(text)")
    window.page.keyboard.press("Control+c")
    copied = window.page.evaluate("navigator.clipboard.readText()")
    assert r"The roots of $ax^2 + bx + c = 0$ cost $5 and are" in copied
    assert r"\[ x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]" in copied


def test_formulas_are_drawn_once_while_a_reply_grows(window: Window) -> None:
    text = r"Let $a_1$ be \(b\) and **c**."
    steps = [render_reply(text[:end]) for end in range(1, len(text) + 1)]
    drawn, seen = window.page.evaluate(GROW, steps)
    assert drawn == 1 and seen[-1] == [2, 2]
    wanted = [html.count('class="math"') for html in steps]
    assert [formulas for formulas, _ in seen] == wanted
    # The first one waits for KaTeX to be read.
    assert all(katex == formulas for formulas, katex in seen[text.index("be") :])
