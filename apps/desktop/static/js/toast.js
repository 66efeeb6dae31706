// Short messages at the foot of the window that go away by themselves; knows nothing of what they report.

import { h } from "./dom.js";

const SHOWN_MS = 6000;

/** Shows a message with at most one action; `onend` is called when it went away without the action taken. */
export function toast(text, { hint = "", action = "", forMs = SHOWN_MS, onaction, onend } = {}) {
  const box = h("div", { class: "toast" }, h("div", {}, text, hint && h("div", { class: "hint" }, hint)));
  const end = (then) => {
    clearTimeout(timer);
    box.remove();
    then?.();
  };
  const timer = setTimeout(() => end(onend), forMs);
  if (action) box.append(h("button", { type: "button", onclick: () => end(onaction) }, action));
  else box.append(h("button", { type: "button", "aria-label": "Dismiss", onclick: () => end(onend) }, "OK"));
  region.append(box);
  raise();
}

const region = document.getElementById("toasts");

/** Nothing outside an open dialog can be seen well or pressed, so messages move into it and out again. */
function raise() {
  const host = document.querySelector("dialog[open]") ?? document.body;
  if (region.parentElement !== host) host.append(region);
}

for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("close", raise);

/** Shows what went wrong in a call; a server that is gone has a banner of its own. */
export function report(failure) {
  if (failure.gone) toast(failure.message);
  else toast(failure.message, { hint: failure.hint, forMs: 10000 });
}
