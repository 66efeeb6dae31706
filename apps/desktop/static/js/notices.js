// States that the user should know of: the banner of a lost server, and the notice above the field.

import * as api from "./api.js";
import { withSlack } from "./budget.js";
import { show as showConversation } from "./chats.js";
import { h, icon, progressBar } from "./dom.js";
import { contextIsFull } from "./figures.js";
import { count, size } from "./format.js";
import { openModels } from "./models.js";
import { follow, get } from "./store.js";
import { report } from "./toast.js";
import { path } from "./tree.js";

const BANNERS = {
  gone: "The app's server does not answer. Trying again…",
  denied: "This window is no longer signed in. Open the address that `edgeinfer chat` shows.",
};

/** Puts banner and notice on the page and keeps them up to date. */
export function createNotices() {
  const banner = document.getElementById("banner");
  follow(["link"], ({ link }) => {
    const text = BANNERS[link];
    banner.hidden = !text;
    banner.replaceChildren(...(text ? [icon("offline"), text] : []));
  });
  const place = h("div", { id: "notice" });
  document.getElementById("dock").prepend(place);
  const loading = createLoading();
  follow(["model", "conversation", "link"], ({ model, conversation }) => {
    const full = conversation && contextIsFull(path(conversation), model);
    const kind = !model ? null : NOTICES[model.status] ? model.status : full ? "full" : model.warning ? "scarce" : null;
    if (kind === "loading") loading.show(model);
    const notice = kind === "loading" ? loading.element : kind && NOTICES[kind](model);
    if (place.firstChild !== notice || !notice) place.replaceChildren(...(notice ? [notice] : []));
  });
}

const NOTICES = { empty, loading: () => null, failed, full, scarce };

function notice(kind, drawing, title, text, ...buttons) {
  return h(
    "section",
    { class: `notice ${kind}`, "aria-label": title },
    icon(drawing),
    h("div", { class: "text" }, h("strong", {}, title), h("span", {}, text)),
    h("div", { class: "buttons" }, buttons),
  );
}

function button(text, onclick, kind = "") {
  return h("button", { type: "button", class: `button small ${kind}`, onclick }, text);
}

function empty() {
  return notice(
    "empty",
    "chip",
    "No model is loaded",
    "Nothing is held in memory until you choose one.",
    button("Choose a model", () => openModels(), "primary"),
  );
}

function failed(model) {
  const { message, hint, minimum_bytes: minimum } = model.error ?? {};
  const title = minimum ? "The memory budget is too small" : "The model could not be loaded";
  const enough = minimum && withSlack(minimum);
  const raise = () => {
    const { context } = get().settings;
    api.loadModel({ model: model.id, memory: enough, context }).catch(report);
  };
  return notice(
    "failed",
    "warning",
    title,
    [message, hint].filter(Boolean).join(" "),
    minimum && button(`Load with ${size(enough)}`, raise, "primary"),
    button(minimum ? "Change the budget" : "Choose a model", () => openModels(model.id)),
  );
}

function full(model) {
  return notice(
    "full",
    "warning",
    "The context is full",
    `The model holds ${count(model.context)} tokens and this conversation has used them. Begin a new one, or load the model with a larger context.`,
    button("New chat", () => showConversation(null), "primary"),
    button("Larger context", () => openModels(model.id)),
  );
}

function scarce(model) {
  return notice(
    "full",
    "warning",
    "Memory is short",
    model.warning,
    button("Models", () => openModels(model.id)),
  );
}

/** The notice while a model loads; it stays the same element, so that its bar moves smoothly. */
function createLoading() {
  const bar = progressBar("Loading the model");
  const cancel = button("Cancel", () => api.cancelLoad().catch(report));
  const element = notice("loading", "chip", "Loading", "", cancel);
  element.append(bar.element);
  const title = element.querySelector("strong");
  const text = element.querySelector(".text span");
  return {
    element,
    show({ name, progress }) {
      title.textContent = `Loading ${name ?? "the model"}`;
      const known = progress && progress.total > 0;
      text.textContent = progress?.stage
        ? `${progress.stage}${known ? `, ${Math.floor((100 * progress.done) / progress.total)}%` : ""}`
        : "Getting ready";
      bar.show(known ? progress.done / progress.total : null);
    },
  };
}
