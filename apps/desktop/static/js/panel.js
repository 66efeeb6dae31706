// The panel of system prompt and sampler, of this chat or of all; knows nothing of what the options do.

import { patchSettings } from "./api.js";
import { update } from "./chats.js";
import { h, icon, iconButton } from "./dom.js";
import { count, size } from "./format.js";
import { openModels } from "./models.js";
import { OPTIONS, RESET } from "./samplers.js";
import { change, follow, get } from "./store.js";
import { report } from "./toast.js";

const SAVE_MS = 400;

const SCOPES = { chat: "This chat", all: "Defaults" };

let panel = null;
let scope = "chat";
const parts = {};

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
    ),
  );
  saveWhenQuiet(system, () => save({ system: system.value }));
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
  for (const button of scopes) {
    button.disabled = button.dataset.scope === "chat" && !conversation;
    button.setAttribute("aria-pressed", String(button.dataset.scope === (chat ? "chat" : "all")));
  }
  note.textContent = chat ? "For this chat only." : "For new chats, and for all that have no settings of their own.";
  const used = (chat ? conversation.choice : settings) ?? model?.choice;
  named.name.textContent = used?.name ?? settings.model_name;
  named.facts.textContent = used ? factsOf(used) : "";
  const holder = chat ? conversation : settings;
  if (document.activeElement !== system) system.value = holder.system ?? "";
  const base = { ...defaults.options, ...(chat ? settings.options : {}) };
  const own = holder.options ?? {};
  const isSet = (name) => own[name] !== undefined && own[name] !== null;
  for (const row of rows) row.show(own[row.name] ?? base[row.name] ?? null, isSet(row.name));
  reset.disabled = !OPTIONS.some(({ name }) => isSet(name));
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
  if (panel.hidden) button.focus();
  else panel.querySelector("textarea").focus();
}

async function save({ options, ...rest }) {
  const { conversation, settings } = get();
  const chat = conversation && scope === "chat";
  const own = (chat ? conversation : settings).options;
  const changes = options ? { ...rest, options: { ...own, ...options } } : rest;
  // Shown at once, so that a second change made before the answer to the first builds on it.
  if (chat) {
    change({ conversation: { ...conversation, ...changes } });
    await update(conversation.id, changes);
    return;
  }
  change({ settings: { ...settings, ...changes } });
  try {
    change({ settings: await patchSettings(changes) });
  } catch (failure) {
    report(failure);
    change({ settings });
  }
}

function saveWhenQuiet(field, run) {
  let wait = 0;
  let dirty = false;
  const now = () => {
    clearTimeout(wait);
    if (dirty) run();
    dirty = false;
  };
  field.addEventListener("input", () => {
    dirty = true;
    clearTimeout(wait);
    wait = setTimeout(now, SAVE_MS);
  });
  field.addEventListener("change", now);
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
      if (fields.includes(document.activeElement)) return;
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
