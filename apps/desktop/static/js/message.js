// One message on the page: its text, actions, versions and figures; knows nothing of the others.

import { showCalls } from "./calls.js";
import * as chats from "./chats.js";
import { h, icon, iconButton } from "./dom.js";
import { createEditor } from "./editor.js";
import { chip } from "./files.js";
import { cutShort, figuresOf, filledContext, liveFiguresOf } from "./figures.js";
import { copyText, showMarkdown } from "./markdown.js";

const COPIED_MS = 1600;
const LEFT_OFF = { stopped: "Stopped.", interrupted: "This reply was interrupted when the app was closed." };

/** A view of a message; `show` brings it up to date and changes only what differs. */
export function createMessage(role) {
  const calls = h("div", { class: "calls" });
  const body = h("div", { class: "body" });
  const extra = h("div");
  const foot = h("div", { class: "message-foot" });
  const label = role === "user" ? "You" : "Reply";
  const element = h("article", { class: `message ${role}`, "aria-label": label }, calls, body, extra, foot);
  const view = { element, message: null, last: false, versions: [], editor: null, waiting: null };

  view.show = (message, versions, { last, busy }) => {
    const same =
      view.message === message && view.last === last && view.busy === busy && view.versions.length === versions.length;
    if (same) return;
    const restyled =
      !view.message || view.message.status !== message.status || view.message.figures !== message.figures;
    const rebuilt = restyled || view.message.live !== message.live || view.last !== last || view.busy !== busy || view.versions.length !== versions.length;
    const textual = view.message?.html !== message.html || restyled;
    Object.assign(view, { message, last, busy, versions });
    element.dataset.id = message.id;
    element.classList.toggle("last", last);
    element.classList.toggle("replying", message.status === "replying");
    element.setAttribute("aria-busy", String(message.status === "replying"));
    showCalls(calls, message.calls ?? []);
    if (textual && !view.editor) showBody(view, body);
    if (rebuilt) {
      extra.replaceChildren(...mishap(view));
      foot.replaceChildren(...footOf(view));
    }
  };

  view.edit = () => startEditing(view, body, extra, foot);
  return view;
}

function showBody(view, body) {
  const { message } = view;
  if (message.status === "replying" && !message.content && !message.calls?.length) {
    if (!body.querySelector(".waiting"))
      body.replaceChildren(h("div", { class: "waiting" }, h("i"), "Reading the prompt…"));
    return;
  }
  body.querySelector(".waiting, .editor")?.remove();
  showFiles(view);
  let text = body.querySelector(":scope > .markdown");
  body.hidden = !message.content && message.attachments?.length > 0;
  if (!text) {
    text = h("div", { class: "markdown", dir: "auto" });
    body.replaceChildren(text);
  }
  showMarkdown(text, message.html);
  showAnswerNow(body, message);
}

/** While the model thinks, it can be asked for its answer. */
function showAnswerNow(body, { status, content }) {
  const thinks = status === "replying" && content.startsWith("<think>") && !content.includes("</think>");
  const shown = body.querySelector(":scope > .answer-now");
  if (!thinks) shown?.remove();
  else if (!shown) {
    const asks = { type: "button", class: "button small answer-now", onclick: chats.answerNow };
    body.append(h("button", asks, "Answer now"));
  }
}

/** The files of a message stand above it. */
function showFiles({ element, message }) {
  if (!message.attachments?.length || element.querySelector(".chips")) return;
  element.prepend(
    h(
      "ul",
      { class: "chips", "aria-label": "Attached files" },
      message.attachments.map((file) => chip(file)),
    ),
  );
}

function startEditing(view, body, extra, foot) {
  const { message } = view;
  const user = message.role === "user";
  const finish = () => {
    view.editor = null;
    view.element.classList.remove("editing");
    extra.hidden = foot.hidden = false;
    body.replaceChildren();
    showBody(view, body);
  };
  view.editor = createEditor({
    content: message.content,
    label: user ? "Edit your message" : "Edit the reply",
    note: user ? `Begins a new branch${message.attachments?.length ? " with the same files" : ""}; this one is kept.` : "Saved as another version; this one is kept.",
    action: user ? "Send" : "Save",
    cancel() {
      finish();
      foot.querySelector("[data-action=edit]")?.focus();
    },
    async save(content) {
      if (await chats.edit(message.id, content)) finish();
    },
  });
  view.element.classList.add("editing");
  body.hidden = false;
  extra.hidden = foot.hidden = true;
  body.replaceChildren(view.editor.element);
  view.editor.focus();
}

function mishap({ message, last, busy }) {
  if (message.status === "error") {
    const { message: text, hint } = message.error ?? {};
    const retry = h(
      "button",
      { type: "button", class: "button small", disabled: busy, onclick: () => chats.regenerate(message.id) },
      icon("retry"),
      "Try again",
    );
    return [line("error", text ?? "The reply failed.", hint, last && retry)];
  }
  const cut = cutShort(message) && !filledContext(message);
  const text = LEFT_OFF[message.status] ?? (cut ? "The reply stopped at its length limit." : null);
  if (!text) return [];
  const more = h(
    "button",
    { type: "button", class: "button small", disabled: busy, onclick: () => chats.goOn(message.id) },
    icon("continue"),
    "Continue",
  );
  return [line("", text, "", last && more)];
}

function line(kind, text, hint, button) {
  return h(
    "div",
    { class: `mishap ${kind}` },
    icon("warning"),
    h("div", { class: "text" }, text, hint && h("small", {}, hint)),
    button,
  );
}

function footOf(view) {
  const { message, versions, busy } = view;
  const replying = message.status === "replying";
  const said = replying ? liveFiguresOf(message) : figuresOf(message);
  const figures = h(
    "div",
    { class: "figures" },
    said.map(([text, title]) => h("span", { title }, text)),
  );
  if (replying) return [figures];
  const parts = [branches(message, versions, busy), actions(view)];
  return message.role === "user" ? parts.reverse() : [...parts, figures];
}

function actions(view) {
  const { message, busy } = view;
  const assistant = message.role === "assistant";
  const copy = iconButton(
    "copy",
    "Copy",
    async () => {
      await copyText(message.content);
      copy.replaceChildren(icon("check"));
      setTimeout(() => copy.replaceChildren(icon("copy")), COPIED_MS);
    },
    { class: "small" },
  );
  const edit = iconButton("edit", "Edit", view.edit, { class: "small", disabled: busy, "data-action": "edit" });
  const again =
    assistant &&
    iconButton("retry", "Regenerate", () => chats.regenerate(message.id), { class: "small", disabled: busy });
  const more =
    assistant &&
    message.content &&
    iconButton("continue", "Continue this reply", () => chats.goOn(message.id), { class: "small", disabled: busy });
  return h("div", { class: "actions" }, message.content && [copy, edit], again, more);
}

function branches(message, versions, busy) {
  if (versions.length < 2) return h("span", { hidden: true });
  const place = versions.findIndex(({ id }) => id === message.id);
  const step = (by, name, label) =>
    iconButton(name, label, () => chats.switchTo(versions[place + by]), {
      class: "small",
      disabled: busy || !versions[place + by],
    });
  const total = versions.length;
  return h(
    "div",
    { class: "branches", role: "group", "aria-label": "Versions" },
    step(-1, "left", "Previous version"),
    h("span", { "aria-label": `Version ${place + 1} of ${total}` }, `${place + 1}/${total}`),
    step(1, "right", "Next version"),
  );
}
