// Counts the message that is being written, with the conversation before it, and says when it is too long to be sent.

import * as api from "./api.js";
import { h, icon } from "./dom.js";
import { contextUse, fittingContext } from "./figures.js";
import { count } from "./format.js";
import { loadContext } from "./growing.js";
import { openModels } from "./models.js";
import { get } from "./store.js";
import { report } from "./toast.js";
import { path } from "./tree.js";

const WAIT_MS = 300;
// Of a template around a message.
const AROUND = 64;

let draft = null;
let changed = () => {};
// What the server counted last; null where nothing is written, or it is not known.
let use = null;
let stale = false;
let wait = 0;
let asking = null;
const note = h("div", { class: "chips-note", role: "status", hidden: true });

/** The line that says what a message takes; `written` gives its text and files, `onchange` is called after counting. */
export function createCounting({ written, onchange }) {
  draft = written;
  changed = onchange;
  return note;
}

/** Counts again once the user has paused. */
export function countSoon() {
  clearTimeout(wait);
  asking?.abort();
  const { content, files } = draft();
  stale = content !== "" || files.length > 0;
  if (!stale) use = null;
  else if (canCount()) wait = setTimeout(countNow, WAIT_MS);
  show();
}

/** Whether what is written may be too long, and has not been counted yet. */
export function isPending() {
  if (!stale || !canCount()) return false;
  const { content, files } = draft();
  const { conversation, model } = get();
  const before = conversation ? (contextUse(path(conversation), model)?.used ?? model.context) : 0;
  // No token is shorter than a byte.
  return files.length > 0 || before + new TextEncoder().encode(content).length + AROUND >= model.context;
}

/** Whether the message fits into the context, as far as that is known. */
export const fits = () => !use || use.tokens < use.context;

/** Tokens that the message takes with all before it; null where nothing is written. */
export const draftUse = () => use && { used: use.tokens, holds: use.context };

/** Tokens of a file alone; undefined where that is not known. */
export const tokensOf = (file) => use?.each[file];

function canCount() {
  const { model, conversation } = get();
  return model?.status === "ready" && !conversation?.replying;
}

async function countNow() {
  asking = new AbortController();
  const own = asking;
  const { conversation } = get();
  const { content, files } = draft();
  const body = { conversation: conversation?.id ?? null, parent: conversation?.leaf ?? null, content };
  try {
    const counted = await api.countTokens({ ...body, attachments: files.map(({ id }) => id) }, own.signal);
    if (asking !== own) return;
    use = counted.context ? counted : null;
  } catch (failure) {
    if (failure.name === "AbortError" || asking !== own) return;
    // A draft's file may have been removed by another window; sending says so.
    if (failure.status !== 404) report(failure);
    use = null;
  }
  stale = false;
  show();
  changed();
}

function show() {
  const said = use && (!fits() || draft().files.length) ? noteOf(use) : [];
  note.hidden = !said.length;
  note.classList.toggle("full", !fits());
  note.replaceChildren(...said);
}

function noteOf({ tokens, context }) {
  const { conversation, model } = get();
  const soFar = conversation ? ", with the conversation so far" : "";
  if (tokens < context) return [`This message takes ${count(tokens)} of ${count(context)} tokens${soFar}.`];
  const { files } = draft();
  const shorter = files.length ? "Remove a file." : "Shorten it.";
  const text = `This message is too long: it takes ${count(tokens)} tokens${soFar}, and the context holds ${count(context)}.`;
  const larger = fittingContext(tokens, model, replyRoom());
  const most = larger ? "" : ` ${model.name} holds no more. ${shorter}`;
  const button = larger
    ? h(
        "button",
        { type: "button", class: "button small primary", onclick: () => loadContext(larger, conversation?.id ?? null) },
        `Load with ${count(larger)} tokens`,
      )
    : h("button", { type: "button", class: "link-button", onclick: () => openModels() }, "Choose another model");
  return [icon("warning"), h("span", {}, text + most), button];
}

/** Tokens that a reply may have, where a chat or the settings say so. */
export function replyRoom() {
  const { conversation, settings } = get();
  return conversation?.options?.max_tokens ?? settings?.options?.max_tokens ?? null;
}
