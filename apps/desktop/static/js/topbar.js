// The bar above the messages: sidebar, loaded model, settings and what can be done with the conversation.

import { exportAddress } from "./api.js";
import { remove, show } from "./chats.js";
import { h, icon, iconButton } from "./dom.js";
import { count, size } from "./format.js";
import { createMenu } from "./menu.js";
import { openModels } from "./models.js";
import { togglePanel } from "./panel.js";
import { renameInList, toggleSidebar } from "./sidebar.js";
import { follow, get } from "./store.js";

/** Fills the bar. */
export function createTopbar() {
  const dot = h("span", { class: "dot" });
  const name = h("span", { class: "name" });
  const facts = h("span", { class: "facts" });
  const model = h(
    "button",
    {
      type: "button",
      class: "model-button",
      id: "model-button",
      "aria-haspopup": "dialog",
      onclick: () => openModels(),
    },
    dot,
    name,
    facts,
    icon("down"),
  );
  const fresh = iconButton("compose", "New chat", () => show(null), { title: "New chat (Ctrl+Shift+O)" });
  const settings = iconButton("sliders", "Chat settings", togglePanel, {
    id: "panel-button",
    "aria-controls": "panel",
    "aria-expanded": "false",
  });
  const menu = createMenu("more", "Conversation menu", items);
  document.getElementById("topbar").append(
    iconButton("sidebar", "Show or hide the conversations", toggleSidebar, {
      id: "sidebar-button",
      "aria-controls": "sidebar",
    }),
    model,
    h("span", { class: "spacer" }),
    fresh,
    settings,
    menu,
  );
  follow(["model"], (state) => {
    const now = state.model;
    dot.className = `dot ${now?.status ?? ""}`;
    name.textContent = label(now);
    facts.textContent = factsOf(now);
    model.setAttribute("aria-label", `Model: ${label(now)}. ${factsOf(now)}`);
  });
  follow(["conversation"], ({ conversation }) => {
    menu.hidden = !conversation;
    document.title = conversation?.title ? `${conversation.title} – edgeinfer` : "edgeinfer";
  });
}

function label(model) {
  if (!model || model.status === "empty") return "Choose a model";
  if (model.status === "loading") return `Loading ${model.name ?? "the model"}…`;
  return model.name ?? "Model";
}

function factsOf(model) {
  if (!model || model.status === "empty" || model.status === "loading") return "";
  if (model.status === "failed") return "not loaded";
  const memory = model.budget_bytes
    ? `${size(model.planned_bytes)} of ${size(model.budget_bytes)}`
    : size(model.planned_bytes);
  return [memory, `${count(model.context)} context`].join(" · ");
}

function items() {
  const { id, title } = get().conversation;
  return [
    { icon: "edit", text: "Rename", run: () => renameInList(id) },
    { icon: "download", text: "Export as Markdown", href: exportAddress(id, "markdown") },
    { icon: "download", text: "Export as JSON", href: exportAddress(id, "json") },
    null,
    { icon: "trash", text: "Delete", danger: true, run: () => remove(id, title) },
  ];
}
