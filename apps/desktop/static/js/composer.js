// The field a message is written in, the context meter and the button that sends or stops.

import * as draft from "./attachments.js";
import { addressed, send, stop } from "./chats.js";
import { countSoon, createCounting, draftUse, fits, isPending } from "./counting.js";
import { h, icon, svg } from "./dom.js";
import { contextUse } from "./figures.js";
import { count } from "./format.js";
import { follow, get } from "./store.js";
import { editLast } from "./thread.js";
import { path } from "./tree.js";

const RADIUS = 7;
const ROUND = 2 * Math.PI * RADIUS;
const HIGH = 0.85;

let field = null;
let sending = false;
// A message was sent before the window was ready to send it.
let waiting = false;

/** Puts the composer into the dock. */
export function createComposer() {
  field = h("textarea", {
    id: "prompt",
    rows: 1,
    placeholder: "Write a message",
    "aria-label": "Message",
    autocomplete: "off",
    spellcheck: "true",
    enterkeyhint: "send",
  });
  const button = h("button", { type: "submit", class: "round" }, icon("send"));
  const meter = createMeter();
  const showAll = () => {
    show(button);
    showMeter(meter);
    if (waiting && !mustWait()) submit();
  };
  const counted = () => {
    draft.showFiles();
    showAll();
  };
  const note = createCounting({ written: () => ({ content: field.value.trim(), files: draft.draftFiles() }), onchange: counted });
  const files = draft.createAttachments({ onchange: showAll });
  const row = h("div", { class: "row" }, files.button, files.input, files.kept, meter.element, h("span", { class: "spacer" }), button);
  const form = h("form", { class: "composer" }, files.chips, field, note, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (get().conversation?.replying) stop();
    else submit();
  });
  form.addEventListener("click", (event) => {
    if (!event.target.closest("button")) field.focus();
  });
  field.addEventListener("input", () => {
    waiting = false;
    remember();
    show(button);
    countSoon();
  });
  field.addEventListener("keydown", onKey);
  field.addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (!pasted.length) return;
    event.preventDefault();
    draft.attach(pasted);
  });
  document.getElementById("dock").append(form);
  follow(["conversation", "opening", "model", "link"], showAll);
  follow(["model"], countSoon);
  followReplies();
  followDraft();
}

/** Puts the cursor into the field. */
export function focusComposer() {
  field.focus();
}

function showMeter(meter) {
  const { conversation, model } = get();
  const shown = conversation ? path(conversation) : [];
  meter.show(draftUse() ?? contextUse(shown, model), model, shown.length > 0);
}

/** Whether sending has to wait: for the server, or for the count of a message that may be too long. */
const mustWait = () => isConnecting() || isPending();

/** Whether the server and the conversation that the address names are still to be heard of. */
function isConnecting() {
  const { link, opening } = get();
  return link === "connecting" || opening;
}

function canSend() {
  const { model, link, conversation } = get();
  const files = draft.attached();
  const written = field.value.trim() !== "" || files?.length > 0;
  return (
    link === "open" &&
    !isConnecting() &&
    addressed() === (conversation?.id ?? null) &&
    model?.status === "ready" &&
    !conversation?.replying &&
    !sending &&
    written &&
    files !== null &&
    fits()
  );
}

function show(button) {
  const replying = Boolean(get().conversation?.replying);
  const label = replying ? "Stop the reply" : "Send";
  if (button.getAttribute("aria-label") !== label) {
    button.replaceChildren(icon(replying ? "stop" : "send"));
    button.classList.toggle("stop", replying);
    button.setAttribute("aria-label", label);
    button.title = replying ? "Stop (Esc)" : "Send (Enter)";
  }
  button.disabled = !replying && !canSend();
}

async function submit() {
  waiting = mustWait();
  if (waiting || !canSend()) return;
  const content = field.value.trim();
  sending = true;
  write("");
  const files = draft.take();
  const taken = await send(content, files.ids);
  sending = false;
  // What was not taken must not be lost.
  if (!taken && !field.value) write(content);
  if (!taken) files.restore();
  field.dispatchEvent(new Event("input"));
}

function onKey(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !field.value && editLast()) {
    event.preventDefault();
  }
}

function write(text) {
  field.value = text;
  field.dispatchEvent(new Event("input"));
}

/** What is written while a reply is made is counted behind it. */
function followReplies() {
  let before = null;
  follow(["conversation"], ({ conversation }) => {
    const now = conversation?.replying ?? null;
    if (before && !now) countSoon();
    before = now;
  });
}

const draftKey = () => `draft:${get().conversation?.id ?? addressed() ?? ""}`;

function remember() {
  if (field.value) sessionStorage.setItem(draftKey(), field.value);
  else sessionStorage.removeItem(draftKey());
}

/** Each conversation has its own unsent text. */
function followDraft() {
  let key = null;
  follow(["conversation"], () => {
    if (draftKey() === key) return;
    // A new chat that has just been given its number keeps what is being written.
    const fresh = key === "draft:" && sending;
    key = draftKey();
    draft.showDraft(key, { fresh });
    if (!fresh) write(sessionStorage.getItem(key) ?? "");
  });
}

function createMeter() {
  const circle = (name) => svg("circle", { class: name, cx: 9, cy: 9, r: RADIUS });
  const used = circle("used");
  used.setAttribute("stroke-dasharray", ROUND);
  const text = h("span");
  const element = h(
    "span",
    { class: "meter", role: "img" },
    svg("svg", { viewBox: "0 0 18 18", "aria-hidden": "true" }, circle("all"), used),
    text,
  );
  return {
    element,
    show(use, model, begun) {
      const holds = use?.holds ?? (model?.status === "ready" ? model.context : null);
      element.hidden = !holds;
      if (!holds) return;
      const part = Math.min(1, (use?.used ?? 0) / holds);
      used.setAttribute("stroke-dashoffset", ROUND * (1 - part));
      used.setAttribute("visibility", part > 0 ? "visible" : "hidden");
      // After an edit the number is not known before the next reply.
      const known = use || !begun;
      const tokens = known ? count(use?.used ?? 0) : "–";
      text.textContent = `${tokens} / ${count(holds)}`;
      element.classList.toggle("high", part >= HIGH && part < 1);
      element.classList.toggle("full", part >= 1);
      element.setAttribute(
        "aria-label",
        `Context: ${known ? tokens : "an unknown number"} of ${count(holds)} tokens in use`,
      );
      element.title = element.getAttribute("aria-label");
    },
  };
}
