// What a model that can be had shows of its download: a button, progress with cancel, what failed, and how to go on.

import * as api from "./api.js";
import { h, icon, progressBar } from "./dom.js";
import { size } from "./format.js";
import { noteDownload } from "./live.js";
import { get } from "./store.js";
import { report } from "./toast.js";

// The name in "Downloading owner/name" is shown next to it already.
const NAME = / (\S+\/\S+)/;
const PATH = / (?:~|\/|[A-Za-z]:[\\/]).*?(?= to \d|$)/;
/** Whether what is fetched is on this computer already. */
const isPath = (id) => /^(?:~|\/|[A-Za-z]:[\\/])/.test(id);
// The stage that counts bytes; others count steps.
const BYTES = "Downloading";

/** The latest download of a model, unless it was taken off the list. */
export function downloadOf(id) {
  return get().downloads.findLast((one) => one.id === id && one.status !== "dismissed") ?? null;
}

/** Begins a download, or goes on with it. */
export async function start(id) {
  try {
    noteDownload(await api.startDownload(id));
  } catch (failure) {
    report(failure);
  }
}

/**
 * The part of an entry that fetches it. `update()` brings it up to date: `id` names the model, `path` is where it lies
 * if it is here, `refusal` says why it cannot be had, `use` is called with the path.
 */
export function createFetch({ id, path, refusal, label = "Download", use }) {
  const element = h("div", { class: "fetching" });
  const bar = progressBar(`Download of ${id}`);
  const state = h("span", { class: "state", role: "status" });
  const cancel = button("Cancel", () => api.cancelDownload(downloadOf(id).key).catch(report), `Cancel the download of ${id}`);
  let shown = null;
  return {
    element,
    update() {
      const download = downloadOf(id);
      const status = download?.status ?? "none";
      if (status === "running") {
        showProgress(download, bar, state);
        if (shown !== status) element.replaceChildren(bar.element, state, cancel);
      } else if (shown !== status) {
        element.replaceChildren(...still(download, { id, path, refusal, label, use }));
      }
      shown = status;
    },
  };
}

function showProgress({ id, stage, done, total }, bar, state) {
  bar.show(total > 0 ? done / total : null);
  const bytes = stage.startsWith(BYTES);
  const amount = !total ? "" : bytes ? `${size(done)} of ${size(total)}` : `${Math.floor((100 * done) / total)}%`;
  const first = isPath(id) ? "Reading the folder" : "Asking the hub";
  state.textContent = [stage.replace(isPath(id) ? PATH : NAME, "") || first, amount].filter(Boolean).join(", ");
}

function still(download, { id, path, refusal, label, use }) {
  const here = download?.status === "done" ? download.model : path;
  if (here) return [h("span", { class: "state here" }, icon("check"), "On this computer"), button("Use", () => use(here), `Use ${id}`)];
  if (download?.status === "failed") {
    const { message, hint } = download.error ?? {};
    return [
      h("span", { class: "state broken" }, [message, hint].filter(Boolean).join(" ")),
      button("Try again", () => start(id), `Download ${id} again`),
    ];
  }
  if (download?.status === "cancelled") {
    const { stage, done, total } = download;
    const text = stage.startsWith(BYTES) && total ? `Stopped at ${size(done)} of ${size(total)}.` : "Not finished.";
    return [
      h("span", { class: "state" }, text),
      button("Resume", () => start(id), `Resume the download of ${id}`, "primary"),
    ];
  }
  if (refusal) return [h("span", { class: "state" }, refusal)];
  return [button(label, () => start(id), `${label} ${id}`, "primary")];
}

function button(text, onclick, name, kind = "") {
  return h("button", { type: "button", class: `button small ${kind}`, "aria-label": name, onclick }, text);
}
