// Models that are being fetched or imported, next to those that are here, and the form that imports one from the disk.

import * as api from "./api.js";
import { refreshCatalog } from "./catalog.js";
import { createBrowser } from "./browse.js";
import { h, icon } from "./dom.js";
import { createFetch } from "./fetching.js";
import { noteDownload } from "./live.js";
import { follow } from "./store.js";
import { report, toast } from "./toast.js";

/** The running downloads; `finished` is called when one is done, `use` with the path of one that is to be used. */
export function createDownloads({ finished, use }) {
  const list = h("div", { class: "downloads" });
  const views = new Map();
  const done = new Set();
  let first = true;
  follow(["downloads"], ({ downloads }) => {
    for (const download of downloads) {
      const view = views.get(download.id) ?? createView(download, use);
      views.set(download.id, view);
      view.update();
      const listed = ["running", "failed", "cancelled"].includes(download.status);
      if (listed) list.append(view.element);
      else view.element.remove();
      if (download.status !== "done" || done.has(download.key)) continue;
      done.add(download.key);
      // Those that were done before this window opened are no news.
      if (first) continue;
      refreshCatalog();
      finished();
      const { name, model } = download;
      toast(`${name} is ready.`, { action: "Use it", forMs: 15000, onaction: () => use(model) });
    }
    first = !downloads.length && first;
  });
  return list;
}

function createView({ id, name }, use) {
  const fetch = createFetch({ id, use });
  const dismiss = h("span", {});
  const element = h("div", { class: "download" }, h("span", { class: "name", title: id }, name), fetch.element, dismiss);
  return { element, update: fetch.update };
}

/** The form that imports a model from the disk; `imported` is called with the path of one that needs no conversion. */
export function createImport(imported) {
  const field = h("input", {
    class: "input",
    id: "import-path",
    placeholder: "Or type a path",
    autocomplete: "off",
    autocapitalize: "off",
    spellcheck: "false",
  });
  const note = h("small", {}, "A .gguf file is used where it is. A checkpoint's folder is converted into a copy.");
  const bring = async (path) => {
    try {
      const { id, download } = await api.importModel(path);
      if (download) noteDownload(download);
      else imported(id);
      field.value = "";
      form.hidden = true;
    } catch (failure) {
      report(failure);
    }
  };
  const browser = createBrowser(bring);
  const choose = h("span", { class: "choosers" });
  const form = h(
    "form",
    { class: "import", hidden: true },
    h("label", { for: "import-path" }, "Import a model from this computer"),
    choose,
    browser.element,
    h("div", { class: "row" }, field, h("button", { type: "submit", class: "button" }, "Import")),
    note,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const path = field.value.trim();
    if (path) bring(path);
  });
  const opener = h(
    "button",
    {
      type: "button",
      class: "button import-button",
      onclick() {
        form.hidden = !form.hidden;
        if (form.hidden) return;
        offerDialogs(choose, bring);
        browser.open();
      },
    },
    icon("folder"),
    "Import from disk",
  );
  return h("div", { class: "fetch" }, form, opener);
}

/** In a window of its own the app can open the system's dialogs of files and folders. */
function offerDialogs(place, bring) {
  const bridge = window.pywebview?.api;
  if (!bridge?.choose_file || place.childElementCount) return;
  const button = (text, choose) =>
    h(
      "button",
      {
        type: "button",
        class: "button small",
        async onclick() {
          const path = await choose();
          if (path) bring(path);
        },
      },
      text,
    );
  place.append(
    button("Choose a file…", () => bridge.choose_file()),
    button("Choose a folder…", () => bridge.choose_folder()),
  );
}
