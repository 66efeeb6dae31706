// A field in place of a message's text, to write it differently; knows nothing of what becomes of it.

import { h } from "./dom.js";

/** An editor of `content`; `save` is called with the new text, `cancel` without. */
export function createEditor({ content, label, note, action, save, cancel }) {
  const field = h("textarea", { "aria-label": label, rows: 2, value: content, spellcheck: "true" });
  const submit = () => {
    const text = field.value.trim();
    if (text && text !== content.trim()) save(text);
    else cancel();
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      submit();
    }
  });
  const row = h(
    "div",
    { class: "row" },
    h("small", {}, note),
    h("button", { type: "button", class: "button small", onclick: cancel }, "Cancel"),
    h("button", { type: "button", class: "button small primary", onclick: submit }, action),
  );
  return {
    element: h("div", { class: "editor" }, field, row),
    focus() {
      field.focus();
      field.setSelectionRange(field.value.length, field.value.length);
    },
  };
}
