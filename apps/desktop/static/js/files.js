// Files of messages as chips, and the sheet that shows the text of one; knows nothing of drafts.

import * as api from "./api.js";
import { h, icon, iconButton } from "./dom.js";
import { count, counted, size } from "./format.js";
import { get } from "./store.js";
import { report } from "./toast.js";

/** A file with its name and what is known of it; `remove` and `keep` make buttons of it, `note` is part of its tooltip. */
export function chip(file, { remove, keep, note, state = "", tokens } = {}) {
  const kept = isKept(file);
  const facts = state || factsOf(file, tokens, kept).join(" · ");
  const inner = [
    icon(kept ? "keep" : "file"),
    h("span", { class: "text" }, h("span", { class: "name" }, file.name), h("span", { class: "facts" }, facts)),
  ];
  const opener = file.id
    ? h(
        "button",
        {
          type: "button",
          class: "open",
          "aria-label": `Show the text of ${file.name}, ${facts}`,
          onclick: () => open(file),
        },
        inner,
      )
    : h("span", { class: "open" }, inner);
  return h(
    "li",
    { class: state ? "chip busy" : "chip", title: [file.name, note].filter(Boolean).join("\n") },
    opener,
    keep && iconButton("keep", `Keep ${file.name} for later conversations`, keep, { class: "small" }),
    remove && iconButton("close", `Remove ${file.name}`, remove, { class: "small" }),
  );
}

/** Whether a file is one that is kept for later, or a copy of one. */
export const isKept = (file) => Boolean(file.document && get().kept?.some(({ id }) => id === file.document));

/** What is known of a file. */
export function factsOf(file, tokens, kept = false) {
  const known = kept ? ["kept"] : [];
  if (file.bytes !== undefined) known.push(size(file.bytes));
  if (file.pages) known.push(counted(file.pages, "page"));
  if (tokens !== undefined) known.push(counted(tokens, "token"));
  return known;
}

/** Shows the text that the model reads of a file. */
async function open(file) {
  const sheet = document.getElementById("viewer");
  try {
    const { name, content, characters } = await api.getAttachment(file.id);
    sheet.replaceChildren(
      h(
        "div",
        { class: "dialog-head" },
        h("h2", { id: "viewer-title" }, name),
        iconButton("close", "Close", () => sheet.close()),
      ),
      h("p", { class: "viewer-note" }, `The model reads this text: ${count(characters)} characters.`),
      h("pre", { class: "viewer-text", tabindex: 0, dir: "auto" }, content),
    );
    sheet.onclick = (event) => {
      if (event.target === sheet) sheet.close();
    };
    sheet.showModal();
  } catch (failure) {
    report(failure);
  }
}
