// Draws the formulas of replies with KaTeX, which is read when the first one comes; knows nothing of Markdown.
//
// The server gives a formula as it was typed, in an element of the class "math". What KaTeX cannot draw stays like that.

import { h } from "./dom.js";

const WAITING = ".math:not([data-tex])";
const DRAWN = ".math[data-tex]";
const MARKS = [/^\$\$([^]*)\$\$$/, /^\$([^]*)\$$/, /^\\\(([^]*)\\\)$/, /^\\\[([^]*)\\\]$/];
// Nothing is fetched, no link is made, and no formula grows without end.
function refuse() {
  throw new Error("A formula may not do that.");
}
const OPTIONS = { trust: refuse, strict: "ignore", output: "html", throwOnError: true, maxSize: 20, maxExpand: 300 };

let reading = null;

/** Draws what is not drawn yet under `root`. */
export async function drawFormulas(root) {
  if (!root.querySelector(WAITING)) return;
  reading ??= import("../katex/katex.min.js");
  if (!window.katex) await reading;
  for (const element of root.querySelectorAll(WAITING)) draw(element);
}

function draw(element) {
  const source = element.textContent;
  const displayMode = element.classList.contains("display");
  const tex = MARKS.map((marks) => marks.exec(source)?.[1]).find((inner) => inner !== undefined) ?? source;
  element.dataset.tex = source;
  try {
    window.katex.render(tex.trim(), element, { ...OPTIONS, displayMode });
    element.setAttribute("role", "math");
    element.setAttribute("aria-label", source);
  } catch {
    element.textContent = source;
    element.classList.add("failed");
  }
}

/** Whether a node is a formula. */
export function isFormula(node) {
  return node.nodeType === Node.ELEMENT_NODE && node.classList.contains("math");
}

/** Whether a formula on the page and one of the server are the same. */
export function sameFormula(present, wanted) {
  if (!isFormula(present) || !isFormula(wanted)) return false;
  const display = (element) => element.classList.contains("display");
  return (present.dataset.tex ?? present.textContent) === wanted.textContent && display(present) === display(wanted);
}

/** Copies formulas as they were typed, and not letter by letter as they are drawn. */
export function enableFormulaCopying() {
  document.addEventListener("copy", (event) => {
    const selection = getSelection();
    if (selection.isCollapsed || event.target.closest?.("textarea, input")) return;
    const range = selection.getRangeAt(0).cloneRange();
    const [first, last] = [range.startContainer, range.endContainer].map((node) => formulaOf(node));
    if (first) range.setStartBefore(first);
    if (last) range.setEndAfter(last);
    const copied = h("div", { class: "copied" }, range.cloneContents());
    const formulas = copied.querySelectorAll(DRAWN);
    if (!formulas.length) return;
    for (const formula of formulas) formula.replaceWith(formula.dataset.tex);
    document.body.append(copied);
    event.clipboardData.setData("text/plain", copied.innerText);
    copied.remove();
    event.preventDefault();
  });
}

function formulaOf(node) {
  return (node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement)?.closest(DRAWN);
}
