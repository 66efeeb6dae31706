// States that the user should know of: the banner of a lost server, and the notice above the field.

import * as api from "./api.js";
import { withSlack } from "./budget.js";
import { adopt, goOn, regenerate, show as showConversation, update } from "./chats.js";
import { h, icon, progressBar } from "./dom.js";
import { replyRoom } from "./counting.js";
import { contextIsFull, fittingContext, isTooLong, largerContext } from "./figures.js";
import { isKept } from "./files.js";
import { count, size } from "./format.js";
import { loadContext } from "./growing.js";
import { openModels } from "./models.js";
import { follow, get, takeModel } from "./store.js";
import { report } from "./toast.js";
import { path } from "./tree.js";

const BANNERS = {
  gone: "The app's server does not answer. Trying again…",
  denied: "This window is no longer signed in. Open the address that edgeinfer showed when it started.",
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
  follow(["model", "conversation", "link", "settings", "kept"], ({ model, conversation }) => {
    const kind = model && kindOf(model, conversation);
    if (kind === "loading") loading.show(model);
    const notice = kind === "loading" ? loading.element : kind && NOTICES[kind](model, conversation);
    if (place.firstChild !== notice || !notice) place.replaceChildren(...(notice ? [notice] : []));
  });
}

const NOTICES = { empty, loading: () => null, failed, other, long, full, scarce };

function kindOf(model, conversation) {
  if (NOTICES[model.status]) return model.status;
  if (usesAnother(conversation, model)) return "other";
  if (conversation && isTooLong(path(conversation), model)) return "long";
  if (conversation && contextIsFull(path(conversation), model)) return "full";
  return model.warning ? "scarce" : null;
}

/** Whether a conversation uses a model that is not loaded, or is loaded in another way. */
function usesAnother(conversation, { choice: loaded }) {
  const own = conversation?.choice;
  if (!own || !loaded || conversation.replying) return false;
  return own.model !== loaded.model || own.memory !== loaded.memory || own.context !== loaded.context;
}

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

function empty(_, conversation) {
  const own = conversation?.choice;
  return notice(
    "empty",
    "chip",
    "No model is loaded",
    own ? `This chat used ${described(own)}.` : "Nothing is kept in memory until you choose one.",
    own && button(`Load ${own.name}`, () => load(own), "primary"),
    button("Choose a model", () => openModels(), own ? "" : "primary"),
  );
}

/** A conversation of another model: nothing is loaded until the user says so. */
function other(model, conversation) {
  const { choice: own } = conversation;
  const same = own.model === model.choice.model;
  const alike = !same && own.name === model.choice.name;
  const called = (choice) => (alike && choice.file ? `${choice.name} (${choice.file})` : choice.name);
  return notice(
    "other",
    "chip",
    same ? "This chat used other settings" : `This chat used ${called(own)}`,
    same
      ? `${own.name} had ${settingsOf(own)}. Now it has ${settingsOf(model.choice)}.`
      : `${called(model.choice)} is loaded now. Only one model is in memory at a time.`,
    button(same ? "Load again" : "Load it", () => load(own), "primary"),
    button(same ? "Stay with the current settings" : `Stay with ${called(model.choice)}`, () => adopt(conversation.id, model.choice)),
  );
}

const described = (choice) => `${choice.name} with ${settingsOf(choice)}`;

function settingsOf({ memory, context }) {
  const window = context ? `${count(context)} tokens of context` : "an automatic context";
  return memory ? `${window} and a memory budget of ${size(memory)}` : window;
}

/** Loads what a conversation uses; new chats go on with the model they had. */
async function load({ model, memory, context }) {
  try {
    takeModel(await api.loadModel({ model, memory, context, default: false }));
  } catch (failure) {
    report(failure);
  }
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

/** The last message does not fit; how long the conversation is with it has been counted. */
function long(model, conversation) {
  const branch = path(conversation);
  const { tokens } = branch.at(-1).error;
  const larger = tokens ? fittingContext(tokens, model, replyRoom()) : largerContext(model);
  const takes = tokens ? `This chat takes ${count(tokens)} tokens` : "This chat takes more tokens than that";
  const most = larger ? "" : `, which is the most that ${model.name} holds`;
  return notice(
    "full",
    "warning",
    "The message is too long",
    `${takes}; the context holds ${count(model.context)}${most}.`,
    larger && button(`Load with ${count(larger)} tokens`, () => continueWith(larger, conversation), "primary"),
    branch.length > 2 && canLeaveOut(model, conversation) && button("Leave out the oldest", () => leaveOut(conversation)),
    button("New chat", () => showConversation(null), larger ? "" : "primary"),
  );
}

/** Whether the oldest messages could be left out, and are not yet. */
function canLeaveOut(model, conversation) {
  const forgets = { ...get().settings?.options, ...conversation.options }.when_full === "leave_out_oldest";
  return !forgets && !readsFilesApart(model, conversation);
}

function full(model, conversation) {
  const larger = largerContext(model);
  const offers = canLeaveOut(model, conversation);
  const holds = `This chat has used all ${count(model.context)} tokens of the context`;
  return notice(
    "full",
    "warning",
    "The context is full",
    larger
      ? `${holds}. To continue, ${model.name} is loaded again with room for ${count(larger)}.`
      : `${holds}, which is the most that ${model.name} holds.`,
    larger && button("Continue", () => continueWith(larger, conversation), "primary"),
    offers && button("Leave out the oldest", () => leaveOut(conversation), larger ? "" : "primary"),
    button("New chat", () => showConversation(null), larger || offers ? "" : "primary"),
  );
}

/** Lets the model read the latest messages alone from now on, and goes on with the reply that found no room. */
async function leaveOut(conversation) {
  const changed = await update(conversation.id, { options: { when_full: "leave_out_oldest" } });
  if (changed) resume(conversation);
}

/** Whether the model reads files before the messages, which are then never left out. */
function readsFilesApart(model, conversation) {
  return !model.not_apart && path(conversation).some(({ attachments }) => attachments?.some(isKept));
}

/** Loads the model with a larger context, and goes on with the reply that found no room in the present one. */
async function continueWith(context, conversation) {
  // The server waits with it until the model is loaded.
  if (await loadContext(context, conversation.id)) resume(conversation);
}

/** Goes on with a conversation's last reply, unless the user has turned to another one meanwhile. */
function resume(conversation) {
  if (get().conversation?.id !== conversation.id) return;
  const last = path(conversation).at(-1);
  if (last.status === "error") regenerate(last.id);
  else goOn(last.id);
}

function scarce(model) {
  return notice(
    "full",
    "warning",
    "Memory is low",
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
