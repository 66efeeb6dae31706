// The panel of system prompt and sampler, of this chat or of all; knows nothing of what the options do.

import { addressed, update } from "./chats.js";
import { h, icon, iconButton } from "./dom.js";
import { count, size } from "./format.js";
import { openModels } from "./models.js";
import { OPTIONS, RESET } from "./samplers.js";
import { merged, saveSettings } from "./saving.js";
import { change, follow, get } from "./store.js";
import { createTools } from "./tools.js";

const SAVE_MS = 400;

const SCOPES = { chat: "This chat", all: "Defaults" };

let panel = null;
let scope = "chat";
const parts = {};
const tools = createTools();
// What the fields are for: the id of a chat, or null for the defaults; undefined until the chat has been read.
let place;
// The fields that the user is changing, which show nothing else meanwhile.
const edited = new Set();
const pauses = [];

/** Fills the panel. */
export function createPanel() {
  panel = document.getElementById("panel");
  Object.assign(parts, createParts());
  const { scopes, note, model, system, rows, reset } = parts;
  panel.append(
    h(
      "div",
      { class: "panel-head" },
      h("h2", {}, "Chat settings"),
      iconButton("close", "Close the settings", togglePanel),
    ),
    h(
      "div",
      { class: "panel-body" },
      h("div", { class: "segments", role: "group", "aria-label": "What the settings are for" }, scopes),
      note,
      model,
      h("label", { class: "field" }, h("span", { class: "label" }, "System prompt"), system),
      h("h3", {}, "Replies"),
      rows.map(({ element }) => element),
      h("div", { class: "panel-foot" }, reset),
      tools.element,
    ),
  );
  saveWhenQuiet(system, () => save({ system: system.value }));
  // Before what is unsaved is sent for the last time.
  window.addEventListener("pagehide", pause, { capture: true });
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    togglePanel();
  });
  follow(["conversation", "settings", "defaults", "model"], render);
}

function createParts() {
  const choose = (name) => {
    scope = name;
    render(get());
  };
  const scopes = Object.entries(SCOPES).map(([name, text]) =>
    h("button", { type: "button", "data-scope": name, onclick: () => choose(name) }, text),
  );
  const system = h("textarea", {
    class: "textarea",
    rows: 4,
    placeholder: "Tells the model how to behave. Leave it empty for none.",
    "aria-label": "System prompt",
  });
  const toDefaults = { type: "button", class: "button", onclick: () => save({ options: RESET }) };
  const reset = h("button", toDefaults, icon("retry"), "Reset to the model's defaults");
  const named = { name: h("span", { class: "name" }), facts: h("span", { class: "facts" }) };
  const model = h(
    "div",
    { class: "panel-model" },
    h("div", { class: "text" }, h("span", { class: "label" }, "Model"), named.name, named.facts),
    h("button", { type: "button", class: "button small", onclick: () => openModels() }, "Change"),
  );
  return { scopes, note: h("p", { class: "note" }), model, named, system, rows: OPTIONS.map(createOption), reset };
}

function render({ conversation, settings, defaults, model }) {
  if (!settings) return;
  const { scopes, note, named, system, rows, reset } = parts;
  const chat = conversation && scope === "chat";
  const unread = scope === "chat" && !conversation && addressed() !== null;
  moveTo(unread ? undefined : chat ? conversation.id : null);
  system.readOnly = unread;
  for (const button of scopes) {
    button.disabled = button.dataset.scope === "chat" && !conversation;
    button.setAttribute("aria-pressed", String(button.dataset.scope === (chat ? "chat" : "all")));
  }
  note.textContent = chat ? "For this chat only." : "For new chats, and for all that have no settings of their own.";
  const used = (chat ? conversation.choice : settings) ?? model?.choice;
  named.name.textContent = used?.name ?? settings.model_name;
  named.facts.textContent = used ? factsOf(used) : "";
  const holder = chat ? conversation : settings;
  if (!edited.has(system)) system.value = unread ? "" : (holder.system ?? "");
  const base = { ...defaults.options, ...(chat ? settings.options : {}) };
  const own = holder.options ?? {};
  const isSet = (name) => own[name] !== undefined && own[name] !== null;
  for (const row of rows) {
    row.element.inert = unread;
    row.show(own[row.name] ?? base[row.name] ?? null, isSet(row.name));
  }
  reset.disabled = unread || !OPTIONS.some(({ name }) => isSet(name));
}

/** Saves what is unsaved where it belongs, before the fields are for something else. */
function moveTo(next) {
  if (next === place) return;
  pause();
  edited.clear();
  place = next;
}

function factsOf({ memory, context }) {
  const budget = memory ? `within ${size(memory)}` : "no memory limit";
  return `${context ? `${count(context)} tokens of context` : "automatic context"}, ${budget}`;
}

/** Opens or closes the panel. */
export function togglePanel() {
  panel.hidden = !panel.hidden;
  const button = document.getElementById("panel-button");
  button.setAttribute("aria-expanded", String(!panel.hidden));
  if (!panel.hidden) tools.refresh();
  if (panel.hidden) button.focus();
  else panel.querySelector("textarea").focus();
}

function save(fields) {
  if (place === null) return saveSettings(fields);
  const { conversation } = get();
  const id = place;
  // Shown at once.
  if (conversation?.id === id) change({ conversation: merged(conversation, fields) });
  return update(id, fields);
}

/** Saves what is typed at once, for what it was typed for. */
function pause() {
  for (const now of pauses) now();
}

function saveWhenQuiet(field, run) {
  let wait = 0;
  let dirty = false;
  const now = () => {
    clearTimeout(wait);
    if (!dirty) return;
    dirty = false;
    run();
  };
  pauses.push(now);
  field.addEventListener("input", () => {
    dirty = true;
    edited.add(field);
    clearTimeout(wait);
    wait = setTimeout(now, SAVE_MS);
  });
  field.addEventListener("change", now);
  field.addEventListener("blur", () => edited.delete(field));
}

function createOption({ name, label, min, max, step, usual, empty, choices, help }) {
  const id = `option-${name}`;
  const fields = choices
    ? [choiceField(id, choices)]
    : max === undefined
      ? [numberField(id, { min, step, empty })]
      : rangeFields(id, label, { min, max, step });
  const [field, slider] = fields;
  const element = h("div", { class: "option" }, h("label", { for: id }, label), field, slider, h("small", {}, help));
  const read = () => (choices ? field.value : field.value === "" ? null : Number(field.value));
  const send = () => {
    if (field.checkValidity()) save({ options: { [name]: read() } });
  };
  for (const one of fields) saveWhenQuiet(one, send);
  return {
    name,
    element,
    show(value, changed) {
      element.classList.toggle("changed", changed);
      if (fields.some((one) => edited.has(one))) return;
      field.value = value ?? usual ?? "";
      if (slider) setSlider(slider, value ?? usual);
    },
  };
}

function choiceField(id, choices) {
  return h(
    "select",
    { id, class: "select compact" },
    choices.map(([value, text]) => h("option", { value }, text)),
  );
}

function numberField(id, { min, max, step, empty }) {
  return h("input", {
    id,
    type: "number",
    class: "input number",
    min,
    max,
    step,
    placeholder: empty ?? null,
    inputmode: "decimal",
  });
}

function rangeFields(id, label, range) {
  const field = numberField(id, range);
  const slider = h("input", { type: "range", class: "slider", "aria-label": label, tabindex: -1, ...range });
  slider.addEventListener("input", () => {
    field.value = slider.value;
    setSlider(slider, slider.value);
  });
  field.addEventListener("input", () => setSlider(slider, field.value));
  return [field, slider];
}

function setSlider(slider, value) {
  slider.value = value;
  slider.style.setProperty("--filled", `${(100 * (slider.value - slider.min)) / (slider.max - slider.min)}%`);
}
