// The keyboard: shortcuts that hold in the whole window, and the sheet that lists them.

import { show, stop } from "./chats.js";
import { focusComposer } from "./composer.js";
import { h, iconButton } from "./dom.js";
import { focusSearch } from "./sidebar.js";
import { get } from "./store.js";

const LISTED = [
  ["Send", ["Enter"]],
  ["New line", ["Shift", "Enter"]],
  ["Stop the reply", ["Esc"]],
  ["Edit the last message", ["↑"]],
  ["Search conversations", ["Ctrl", "K"]],
  ["New chat", ["Ctrl", "Shift", "O"]],
  ["Rename the conversation in focus", ["F2"]],
  ["These shortcuts", ["Ctrl", "/"]],
];

/** Makes the shortcuts work. */
export function enableShortcuts() {
  const sheet = document.getElementById("shortcuts");
  const rows = LISTED.flatMap(([text, keys]) => [
    h("dt", {}, text),
    h(
      "dd",
      {},
      keys.map((key) => h("kbd", {}, key)),
    ),
  ]);
  sheet.append(
    h(
      "div",
      { class: "dialog-head" },
      h("h2", { id: "shortcuts-title" }, "Keyboard"),
      iconButton("close", "Close", () => sheet.close()),
    ),
    h("dl", { class: "shortcut-list" }, rows),
  );
  sheet.addEventListener("click", (event) => {
    if (event.target === sheet) sheet.close();
  });
  document.addEventListener("keydown", onKey);
}

/** Shows the list of shortcuts. */
export function openShortcuts() {
  document.getElementById("shortcuts").showModal();
}

function onKey(event) {
  if (document.querySelector("dialog[open]") || event.isComposing) return;
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  if (command && !event.shiftKey && key === "k") act(event, focusSearch);
  else if (command && event.shiftKey && key === "o")
    act(event, () => {
      show(null);
      focusComposer();
    });
  else if (command && key === "/") act(event, openShortcuts);
  else if (event.key === "Escape" && !document.querySelector(":popover-open") && get().conversation?.replying)
    act(event, stop);
}

function act(event, run) {
  event.preventDefault();
  run();
}
