// Lists the folders of this computer, to choose a model in; knows nothing of what is done with it.

import * as api from "./api.js";
import { h, icon, iconButton } from "./dom.js";
import { size } from "./format.js";
import { report } from "./toast.js";

/** The list; `chosen` is called with the path of a model. */
export function createBrowser(chosen) {
  const place = h("span", { class: "place" });
  const up = iconButton("left", "The folder above", () => parent && go(parent), { class: "small" });
  const list = h("ul", { class: "folder", "aria-label": "Folders and models" });
  const element = h("div", { class: "browser" }, h("div", { class: "row" }, up, place), list);
  let parent = null;
  let shown = null;

  async function go(path) {
    try {
      shown = await api.getFolder(path);
    } catch (failure) {
      report(failure);
      return;
    }
    parent = shown.parent;
    up.disabled = !parent;
    place.textContent = place.title = shown.path;
    const entries = shown.entries.map((entry) =>
      row(entry, () => (entry.kind === "model" ? chosen(entry.path) : go(entry.path))),
    );
    const nothing = !entries.length && h("li", { class: "nothing" }, "No folders or .gguf files are in it.");
    const more = shown.more > 0 && h("li", { class: "nothing" }, `${shown.more} more are not shown.`);
    list.replaceChildren(...[nothing, ...entries, more].filter(Boolean));
    list.querySelector("button")?.focus();
  }

  return { element, open: () => go(shown?.path ?? "") };
}

function row({ name, kind, bytes }, onclick) {
  const model = kind === "model";
  return h(
    "li",
    {},
    h(
      "button",
      { type: "button", onclick, "aria-label": model ? `Import ${name}` : `Open ${name}` },
      icon(model ? "chip" : "folder"),
      h("span", { class: "name" }, name),
      h("span", { class: "facts" }, bytes ? size(bytes) : model ? "model" : ""),
    ),
  );
}
