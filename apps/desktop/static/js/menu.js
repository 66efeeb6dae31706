// A button that opens a menu; knows nothing of what the entries do.

import { h, icon, iconButton } from "./dom.js";

const GAP_PX = 4;

/** A button with a menu of what `entries()` gives when it opens: {icon, text, run | href, danger}, null for a line. */
export function createMenu(drawing, label, entries, attributes = {}) {
  const button = iconButton(drawing, label, () => open(button, entries()), {
    "aria-haspopup": "menu",
    "aria-expanded": "false",
    ...attributes,
  });
  return button;
}

function open(button, entries) {
  const menu = h(
    "div",
    { class: "menu", role: "menu", popover: "auto" },
    entries.map((entry) => entryOf(entry, () => menu.hidePopover())),
  );
  menu.addEventListener("toggle", ({ newState }) => {
    button.setAttribute("aria-expanded", String(newState === "open"));
    if (newState === "closed") menu.remove();
  });
  menu.addEventListener("keydown", (event) => move(event, menu));
  document.body.append(menu);
  menu.showPopover();
  place(menu, button.getBoundingClientRect());
  menu.querySelector("[role=menuitem]").focus();
}

function entryOf(entry, close) {
  if (!entry) return h("hr");
  const { icon: drawing, text, run, href, danger } = entry;
  const attributes = { role: "menuitem", tabindex: -1, class: danger ? "danger" : null };
  if (href) return h("a", { ...attributes, href, download: true, onclick: close }, icon(drawing), text);
  return h(
    "button",
    {
      type: "button",
      ...attributes,
      onclick: () => {
        close();
        run();
      },
    },
    icon(drawing),
    text,
  );
}

function place(menu, anchor) {
  const { width, height } = menu.getBoundingClientRect();
  const left = Math.min(Math.max(8, anchor.right - width), window.innerWidth - width - 8);
  const below = anchor.bottom + GAP_PX;
  const top = below + height + 8 > window.innerHeight ? Math.max(8, anchor.top - height - GAP_PX) : below;
  menu.style.left = `${left}px`;
  menu.style.top = `${top}px`;
}

function move(event, menu) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const all = [...menu.querySelectorAll("[role=menuitem]")];
  all[(all.indexOf(document.activeElement) + step + all.length) % all.length].focus();
}
