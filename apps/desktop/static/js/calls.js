// The calls of tools in a reply: what was called with what, what came of it, and the question whether it may be.

import { allow } from "./chats.js";
import { announce, h } from "./dom.js";

const STATES = {
  asked: "waits for you",
  running: "is running…",
  done: "is done",
  failed: "failed",
  refused: "was refused",
};
const ANSWERS = [
  ["once", "Allow once"],
  ["always", "Always allow"],
  ["no", "Refuse"],
  ["never", "Never allow"],
];

/** Shows the calls of a message in their box; those that are shown as they are stay. */
export function showCalls(box, calls) {
  calls.forEach((call, place) => {
    const said = JSON.stringify(call);
    const before = box.children[place];
    if (before?.dataset.said === said) return;
    const made = card(call);
    made.dataset.said = said;
    if (before) before.replaceWith(made);
    else box.append(made);
    if (call.status === "asked") announce(`The model wants to call ${call.name}.`);
  });
  while (box.children.length > calls.length) box.lastChild.remove();
}

function card(call) {
  const { name, server, status, result } = call;
  const head = h("div", { class: "call-head" }, h("code", {}, name), server && h("span", {}, `of ${server}`), h("span", {}, STATES[status]));
  const given = h("pre", { class: "call-text" }, pretty(call.arguments));
  if (status === "asked") {
    const answers = ANSWERS.map(([answer, text]) =>
      h("button", { type: "button", class: "button small", "data-allow": answer, onclick: () => allow(call.id, answer) }, text),
    );
    return h("section", { class: "call asked", "aria-label": `Call of ${name}` }, head, given, h("div", { class: "call-answers" }, answers));
  }
  const answer = result && h("pre", { class: "call-text" }, result);
  return h("details", { class: `call ${status}` }, h("summary", {}, head), given, answer);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}
