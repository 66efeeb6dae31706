// The messages of the shown conversation, or the start of a new one; knows nothing of a single message's looks.

import { card } from "./catalog.js";
import { send } from "./chats.js";
import { h, iconButton } from "./dom.js";
import { enableFormulaCopying } from "./formulas.js";
import { enableCopying } from "./markdown.js";
import { createMessage } from "./message.js";
import { openCatalog, use } from "./models.js";
import { createFollower } from "./scroll.js";
import { follow } from "./store.js";
import { path, siblings } from "./tree.js";

// What each kind of model is good for.
const SUGGESTIONS = {
  stories: [
    "Tell me a story about a little boat.",
    "Once upon a time there was a lighthouse",
    "A story about two friends and a kite",
  ],
  code: [
    "Write a Python function that tells whether a word is a palindrome.",
    "Explain this line: squares = {n: n * n for n in range(10)}",
    "How do I undo my last commit in Git?",
  ],
  chat: [
    "Explain in three sentences how a rainbow forms.",
    "Write a short e-mail that moves a meeting to Friday.",
    "Plan a weekend in Lisbon without a car.",
  ],
  base: ["The three primary colours are", "Water boils at a lower temperature on a mountain because", "Dear Ms Miller, thank you for"],
};
const BUILT_IN = "The built-in model is ready. It is tiny and tells short children's stories.";
const BASE = "This model continues what you write; it was not trained to answer. Everything stays on this computer.";
const PRIVATE = "Everything stays on this computer: the model, and what you write.";

let views = new Map();
let shownId = null;
let follower = null;

/** Fills the thread and keeps it up to date. */
export function createThread() {
  const box = document.getElementById("thread");
  const inner = document.getElementById("messages");
  const newest = iconButton("newest", "Go to the newest message", () => follower.toEnd(), {
    class: "newest",
    hidden: true,
  });
  document.getElementById("dock").prepend(newest);
  // A start is read from its top; there is nothing newest in it.
  const still = () => views.size === 0;
  const seen = (following) => {
    newest.hidden = following || still();
  };
  follower = createFollower(box, inner, seen, still);
  enableCopying(inner);
  enableFormulaCopying();
  follow(["conversation", "opening", "model", "catalog"], (state) => render(inner, state));
}

/** Opens the editor of the last message of the user; false where there is none. */
export function editLast() {
  const view = [...views.values()].findLast(({ message, busy }) => message.role === "user" && !busy);
  view?.edit();
  return Boolean(view);
}

function render(inner, { conversation, opening, model, catalog }) {
  const shown = conversation ? path(conversation) : [];
  if (!shown.length) {
    const left = views.size > 0;
    views = new Map();
    shownId = conversation?.id ?? null;
    showStart(inner, opening, model, catalog);
    if (left) document.getElementById("thread").scrollTop = 0;
    return;
  }
  const moved = shownId !== conversation.id;
  shownId = conversation.id;
  const lastBefore = [...views.keys()].at(-1);
  const next = new Map();
  const busy = Boolean(conversation.replying);
  shown.forEach((message, place) => {
    const view = views.get(message.id) ?? createMessage(message.role);
    view.show(message, siblings(conversation, message), { last: place === shown.length - 1, busy });
    next.set(message.id, view);
  });
  views = next;
  arrange(
    inner,
    [...next.values()].map(({ element }) => element),
  );
  if (moved || lastBefore !== shown.at(-1).id) follower.toEnd();
}

let started = [];

/** The start is made again only where it differs: somebody may have the focus on a button in it. */
function showStart(inner, opening, model, catalog) {
  const now = [opening, model?.status, model?.id, catalog];
  if (inner.querySelector(":scope > .welcome") && now.every((value, place) => value === started[place])) return;
  started = now;
  inner.replaceChildren(...(opening ? [] : [welcome(model, catalog)]));
}

/** Puts elements in order without moving those that are in their place, which would lose focus and selections. */
function arrange(inner, elements) {
  const wanted = new Set(elements);
  for (const child of [...inner.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, place) => {
    if (inner.children[place] !== element) inner.insertBefore(element, inner.children[place] ?? null);
  });
}

function welcome(model, catalog) {
  const ready = model?.status === "ready";
  const builtIn = ready && (model.id === null || model.id === "built-in" || model.source === "built-in");
  const suggestion = (text) => h("button", { type: "button", onclick: () => send(text) }, text);
  return h(
    "div",
    { class: "welcome" },
    h("h1", {}, "What shall we talk about?"),
    h("p", {}, builtIn ? BUILT_IN : ready && model.kind === "base" ? BASE : PRIVATE),
    ready && h("div", { class: "suggestions" }, (SUGGESTIONS[model.kind] ?? SUGGESTIONS.chat).map(suggestion)),
    builtIn && catalog && realModels(catalog),
  );
}

/** What is offered as long as there is only the built-in model. */
function realModels({ models, recommended, room }) {
  const offered = models.filter(({ name, path }) => recommended.includes(name) && !path);
  if (!offered.length || models.some(({ path }) => path)) return null;
  return h(
    "section",
    { class: "offered", "aria-label": "Get a real model" },
    h(
      "div",
      { class: "offered-head" },
      h("h2", {}, "Get a real model"),
      h("button", { type: "button", class: "link-button", onclick: openCatalog }, "See all"),
    ),
    h("p", {}, "These suit this computer. Everything stays on it: the model, and what you write."),
    h("div", { class: "card-grid" }, offered.map((model) => card(model, room, use))),
  );
}
