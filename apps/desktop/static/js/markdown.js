// Puts the server's HTML of a reply into the page, changing only what differs; knows no Markdown.
//
// The server escapes what a model writes. The page's policy forbids inline scripts and styles, and this file passes on
// only what Markdown makes, so that three walls stand between a reply and the page.

import { drawFormulas, isFormula, sameFormula } from "./formulas.js";

const SHORT_COPIED_MS = 1600;
const ATTRIBUTES = new Set(["class", "href", "title", "start", "open"]);
// Task lists have boxes, which nobody can tick.
const BOX = "input[type=checkbox]";
const BOX_ATTRIBUTES = new Set(["class", "type", "checked", "disabled"]);
const FORBIDDEN = `script, style, iframe, object, embed, form, input:not(${BOX}), textarea, select, link, meta, base, svg, math`;
// How Markdown's tables are aligned. The page's policy refuses the attribute, and says so for every cell.
const ALIGN = /<(t[hd]) style="text-align:(left|center|right)">/g;

/** Shows `html` in `target`; elements that stay the same are kept, so that selections and scroll positions survive. */
export function showMarkdown(target, html) {
  const template = document.createElement("template");
  template.innerHTML = html.replace(ALIGN, '<$1 class="align-$2">');
  clean(template.content);
  morph(target, template.content);
  drawFormulas(target);
}

function clean(content) {
  for (const element of content.querySelectorAll(FORBIDDEN)) element.remove();
  for (const image of content.querySelectorAll("img")) image.replaceWith(linkFor(image));
  for (const element of content.querySelectorAll("*")) {
    const kept = element.matches(BOX) ? BOX_ATTRIBUTES : ATTRIBUTES;
    for (const { name } of [...element.attributes]) {
      if (!kept.has(name)) element.removeAttribute(name);
    }
  }
  for (const box of content.querySelectorAll("input")) box.disabled = true;
  for (const link of content.querySelectorAll("a[href]")) {
    if (!/^(https?|mailto):/i.test(link.getAttribute("href"))) link.removeAttribute("href");
    link.setAttribute("target", "_blank");
    link.setAttribute("rel", "noopener noreferrer");
  }
  for (const button of content.querySelectorAll("button.copy")) button.setAttribute("type", "button");
  for (const block of content.querySelectorAll("pre")) block.setAttribute("tabindex", "0");
}

/** Pictures would be fetched from wherever a model says; their address is shown instead. */
function linkFor(image) {
  const link = document.createElement("a");
  link.setAttribute("href", image.getAttribute("src") ?? "");
  link.textContent = image.getAttribute("alt") || "picture";
  return link;
}

function morph(target, source) {
  let present = target.firstChild;
  for (const wanted of [...source.childNodes]) {
    if (!present) {
      target.append(wanted);
      continue;
    }
    const next = present.nextSibling;
    if (isFormula(present) || isFormula(wanted)) {
      if (!sameFormula(present, wanted)) present.replaceWith(wanted);
    } else if (present.nodeType !== wanted.nodeType || present.nodeName !== wanted.nodeName) present.replaceWith(wanted);
    else if (present.nodeType === Node.TEXT_NODE) morphText(present, wanted.data);
    else {
      morphAttributes(present, wanted);
      // A button that says "Copied" goes back by itself.
      if (!present.matches("button.copy")) morph(present, wanted);
    }
    present = next;
  }
  while (present) {
    const next = present.nextSibling;
    present.remove();
    present = next;
  }
}

function morphText(present, data) {
  // Appending leaves a selection of the text before it alone.
  if (data.startsWith(present.data)) present.appendData(data.slice(present.data.length));
  else present.data = data;
}

function morphAttributes(present, wanted) {
  // What a reader has folded or unfolded stays so.
  const own = (name) => name === "open";
  for (const { name } of [...present.attributes])
    if (!own(name) && !wanted.hasAttribute(name)) present.removeAttribute(name);
  for (const { name, value } of wanted.attributes) {
    if (!own(name) && present.getAttribute(name) !== value) present.setAttribute(name, value);
  }
}

/** Copies text; a page that is not on localhost has no clipboard but the old way. */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "visually-hidden";
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** Makes the copy buttons of code blocks under `root` work. */
export function enableCopying(root) {
  root.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    await copyText(button.closest(".code").querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => {
      button.textContent = "Copy";
    }, SHORT_COPIED_MS);
  });
}
