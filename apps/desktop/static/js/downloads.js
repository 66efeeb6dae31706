// Fetching models from the hub, with progress and cancel; knows nothing of what is done with them.

import * as api from "./api.js";
import { h, iconButton, progressBar } from "./dom.js";
import { size } from "./format.js";
import { noteDownload } from "./live.js";
import { follow } from "./store.js";
import { report } from "./toast.js";

/** The form and the running downloads; `finished` is called when one is done. */
export function createDownloads(finished) {
  const field = h("input", {
    class: "input",
    id: "hub-id",
    placeholder: "owner/model",
    autocomplete: "off",
    autocapitalize: "off",
    spellcheck: "false",
  });
  const button = h("button", { type: "submit", class: "button" }, "Download");
  const form = h("form", {}, field, button);
  const list = h("div", { "aria-live": "off" });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const id = field.value.trim();
    if (!id) return;
    try {
      noteDownload(await api.startDownload(id));
      field.value = "";
    } catch (failure) {
      report(failure);
    }
  });
  const views = new Map();
  const done = new Set();
  follow(["downloads"], ({ downloads }) => {
    for (const download of downloads) {
      const view = views.get(download.key) ?? createView(download);
      views.set(download.key, view);
      view.show(download);
      const listed = download.status === "running" || download.status === "failed";
      if (listed && !view.dismissed) list.append(view.element);
      else view.element.remove();
      if (download.status === "done" && !done.has(download.key)) {
        done.add(download.key);
        finished();
      }
    }
  });
  return h("div", { class: "fetch" }, h("label", { for: "hub-id" }, "Download from the hub"), form, list);
}

function createView({ key, id }) {
  const bar = progressBar(`Download of ${id}`);
  const state = h("span", { class: "state" });
  const view = { dismissed: false };
  const close = iconButton(
    "close",
    "Cancel the download",
    () => {
      if (view.status === "running") api.cancelDownload(key).catch(report);
      else {
        view.dismissed = true;
        element.remove();
      }
    },
    { class: "small" },
  );
  const element = h(
    "div",
    { class: "download" },
    h("span", { class: "name", title: id }, id),
    close,
    bar.element,
    state,
  );
  view.element = element;
  view.show = ({ done, total, status, error }) => {
    view.status = status;
    element.className = `download ${status}`;
    bar.element.hidden = status !== "running";
    bar.show(total > 0 ? done / total : null);
    state.textContent =
      status === "failed"
        ? [error?.message ?? error, error?.hint].filter(Boolean).join(" ")
        : total > 0
          ? `${size(done)} of ${size(total)}`
          : "Asking the hub…";
    const label = status === "running" ? "Cancel the download" : "Dismiss";
    close.setAttribute("aria-label", label);
    close.title = label;
  };
  return view;
}
