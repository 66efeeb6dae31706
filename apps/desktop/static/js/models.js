// The dialog in which a model, its context and its memory budget are chosen, with the plan that follows from them.

import * as api from "./api.js";
import { createBudget } from "./budget.js";
import { h, icon, iconButton } from "./dom.js";
import { createCatalogPane, refreshCatalog } from "./catalog.js";
import { createDownloads, createImport } from "./downloads.js";
import { bits, count, parameters, size } from "./format.js";
import { createModelList } from "./model-list.js";
import { createPlanView } from "./plan.js";
import { change, follow, get, takeModel } from "./store.js";
import { report, toast } from "./toast.js";

const PLAN_WAIT_MS = 150;
const SMALLEST_CONTEXT = 256;
// Where the slider begins: below the smallest budget, so that one sees what does not fit.
const BELOW_LEAST = 0.7;

let dialog = null;
let parts = null;
// What is chosen in the dialog and not yet loaded.
const wanted = { model: null, memory: null, context: null };
let models = [];
let asking = null;
let wait = 0;

/** Makes the dialog. */
export function createModels() {
  dialog = document.getElementById("models");
  parts = {
    list: createModelList(select),
    budget: createBudget((memory) => {
      wanted.memory = memory;
      planSoon();
    }),
    context: h("select", { class: "select", id: "context-size" }),
    view: createPlanView((memory) => {
      wanted.memory = memory;
      setBudget();
      planNow();
    }),
    title: h("h3", {}),
    subtitle: h("p", { class: "subtitle" }),
    usual: h("input", { type: "checkbox", checked: true }),
    load: h("button", { type: "button", class: "button primary", id: "load-button", onclick: load }, "Load"),
    unload: h("button", { type: "button", class: "button", onclick: unload }, icon("eject"), "Unload"),
    remove: h("button", { type: "button", class: "button", hidden: true, onclick: removeChosen }, icon("trash"), "Remove"),
    plan: h("div", { class: "plan" }),
  };
  const { list, budget, context, view, title, subtitle, plan } = parts;
  parts.scope = h("label", { class: "check" }, parts.usual, "Use it for new chats too");
  const contextRow = h("div", { class: "pair" }, h("label", { for: "context-size" }, "Context"), context);
  parts.controls = h("div", { class: "plan-result" }, contextRow, budget.element);
  plan.append(h("div", {}, title, subtitle), parts.controls, view.element);
  parts.catalog = createCatalogPane(use);
  parts.catalog.element.hidden = true;
  parts.tabs = createTabs();
  dialog.append(
    h(
      "div",
      { class: "dialog-head" },
      iconButton("left", "Back to the list", () => dialog.classList.remove("detail"), { class: "back" }),
      h("h2", { id: "models-title" }, "Models"),
      parts.tabs,
      iconButton("close", "Close", () => dialog.close()),
    ),
    parts.catalog.element,
    h(
      "div",
      { class: "models-body" },
      h(
        "div",
        { class: "models-left" },
        list.element,
        createDownloads({ finished: readModels, use }),
        createImport(async (id) => {
          await readModels();
          select(models.find((one) => one.id === id) ?? wanted.model);
        }),
      ),
      h(
        "div",
        { class: "models-right" },
        plan,
        h("div", { class: "models-foot" }, parts.unload, parts.remove, h("span", { class: "spacer" }), parts.scope, parts.load),
      ),
    ),
  );
  context.addEventListener("change", () => {
    wanted.context = context.value ? Number(context.value) : null;
    planNow();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  follow(["model"], () => {
    if (dialog.open) showList();
  });
}

/** Opens the dialog with a model chosen: the named one, else the loaded one, with its budget and context. */
export async function openModels(id, chosen = {}, tab = "mine") {
  showTab(tab);
  if (dialog.open) return;
  const { settings, model, conversation } = get();
  const present = conversation?.choice ?? model?.choice ?? settings;
  Object.assign(wanted, { memory: present?.memory ?? null, context: present?.context ?? null, ...chosen });
  parts.scope.hidden = !conversation;
  parts.usual.checked = true;
  dialog.classList.remove("detail");
  undecided();
  dialog.showModal();
  // What was found before is shown at once; looking again plans each model that is new, which takes seconds.
  if (models.length) showList();
  else parts.list.wait();
  dialog.classList.toggle("looking", !models.length);
  await readModels();
  dialog.classList.remove("looking");
  const first = models.find((one) => one.id === (id ?? model?.id)) ?? models[0];
  if (first) select(first, { detail: id !== undefined });
  if (!dialog.classList.contains("more")) parts.list.element.querySelector("[aria-selected=true]")?.focus();
}

const TABS = { mine: "On this computer", more: "Get more" };

function createTabs() {
  const choose = (name) => {
    showTab(name);
    if (name === "more") parts.catalog.focus();
  };
  const buttons = Object.entries(TABS).map(([name, text]) =>
    h("button", { type: "button", "data-tab": name, onclick: () => choose(name) }, text),
  );
  return h("div", { class: "segments", role: "group", "aria-label": "Which models" }, buttons);
}

function showTab(name) {
  for (const button of parts.tabs.children) button.setAttribute("aria-pressed", String(button.dataset.tab === name));
  dialog.classList.toggle("more", name === "more");
  parts.catalog.element.hidden = name !== "more";
  if (name === "more") refreshCatalog();
}

/** Opens the dialog with the models that can be had. */
export function openCatalog() {
  openModels(undefined, {}, "more");
  parts.catalog.focus();
}

/** Loads a model as the settings have it, for the chat on show and for new ones. */
export async function use(id) {
  const { settings, conversation } = get();
  const { memory = null, context = null } = settings ?? {};
  await loadChosen({ model: id, memory, context, conversation: conversation?.id ?? null, default: true });
}

/** Removes the chosen model's files, once that has been confirmed by a second press. */
async function removeChosen() {
  const { id, name } = wanted.model;
  if (parts.remove.dataset.sure !== id) {
    parts.remove.dataset.sure = id;
    parts.remove.replaceChildren(icon("trash"), `Remove ${size(wanted.model.bytes)} from the disk?`);
    return;
  }
  try {
    const { freed_bytes: freed } = await api.removeModel(id);
    toast(`${name} is removed; ${size(freed)} are free again.`);
    await readModels();
    select(models[0], { detail: false });
    refreshCatalog();
  } catch (failure) {
    report(failure);
  }
}

/** Until there is a plan of what is chosen, nothing can be loaded. */
function undecided() {
  parts.plan.classList.add("stale");
  parts.load.disabled = true;
}

async function readModels() {
  try {
    ({ models } = await api.getModels());
  } catch (failure) {
    report(failure);
  }
  showList();
}

function showList() {
  const { model } = get();
  parts.list.show(models, wanted.model?.id, model);
  parts.unload.hidden = model?.status !== "ready";
  const { id, source } = wanted.model ?? {};
  parts.remove.hidden = !["hub", "converted", "imported"].includes(source) || id === model?.id;
  delete parts.remove.dataset.sure;
  parts.remove.replaceChildren(icon("trash"), "Remove");
  parts.load.textContent = model?.status === "ready" && model.id === wanted.model?.id ? "Load again" : "Load";
}

function select(model, { detail = true } = {}) {
  const other = wanted.model?.id !== model.id;
  wanted.model = model;
  dialog.classList.toggle("detail", detail);
  showList();
  parts.title.textContent = model.name;
  const facts = [
    model.architecture,
    parameters(model.parameters),
    bits(model.bits_per_weight),
    model.bytes && `${size(model.bytes)} on disk`,
  ];
  parts.subtitle.textContent = [...facts, model.place].filter(Boolean).join(" · ");
  parts.controls.hidden = Boolean(model.error);
  if (other) {
    undecided();
    parts.view.showNothing();
  }
  if (model.error) {
    parts.view.showError(typeof model.error === "string" ? { message: model.error } : model.error);
    parts.load.disabled = true;
    parts.plan.classList.remove("stale");
    return;
  }
  fillContexts(model);
  setBudget();
  planNow();
}

function fillContexts({ context: most }) {
  const sizes = [];
  for (let tokens = SMALLEST_CONTEXT; most && tokens < most; tokens *= 2) sizes.push(tokens);
  if (most) sizes.push(most);
  const fitting =
    sizes.includes(wanted.context) || wanted.context === null || (most && wanted.context > most)
      ? sizes
      : [...sizes, wanted.context].sort((a, b) => a - b);
  if (most && wanted.context > most) wanted.context = most;
  parts.context.replaceChildren(
    h("option", { value: "" }, "Automatic"),
    ...fitting.map((tokens) => h("option", { value: tokens }, `${count(tokens)} tokens`)),
  );
  parts.context.value = wanted.context ?? "";
}

function setBudget() {
  const least = (wanted.model.minimum_bytes ?? 60e6) * BELOW_LEAST;
  const most = get().machine?.total_bytes ?? 16e9;
  parts.budget.set({ least, most }, wanted.memory);
}

function planSoon() {
  asking?.abort();
  parts.plan.classList.add("stale");
  clearTimeout(wait);
  wait = setTimeout(planNow, PLAN_WAIT_MS);
}

async function planNow() {
  clearTimeout(wait);
  asking?.abort();
  asking = new AbortController();
  const own = asking;
  parts.plan.classList.add("stale");
  try {
    const plan = await api.plan({ model: wanted.model.id, memory: wanted.memory, context: wanted.context }, own.signal);
    if (asking !== own) return;
    parts.view.show(asLoaded(plan), get().machine);
    if (wanted.context === null) parts.context.options[0].textContent = `Automatic: ${count(plan.choice.context)} tokens`;
    parts.load.disabled = !plan.fits;
  } catch (failure) {
    if (failure.name === "AbortError" || asking !== own) return;
    parts.view.showError(failure);
    parts.load.disabled = true;
  }
  parts.plan.classList.remove("stale");
}

/** A plan, with what the model was loaded with where it is loaded like that: a process changes a little meanwhile. */
function asLoaded(plan) {
  const { model } = get();
  const { choice, planned_bytes } = model ?? {};
  const { memory, context } = wanted;
  const same = model?.status === "ready" && model.id === wanted.model.id && choice?.memory === memory && choice?.context === context;
  return same ? { ...plan, planned_bytes } : plan;
}

async function load() {
  const { model, memory, context } = wanted;
  const { conversation } = get();
  const usual = !conversation || parts.usual.checked;
  await loadChosen({ model: model.id, memory, context, conversation: conversation?.id ?? null, default: usual });
}

async function loadChosen(body) {
  const { model, memory, context } = body;
  try {
    const loading = await api.loadModel(body);
    const { settings, conversation } = get();
    const name = loading.choice?.name;
    if (body.default) change({ settings: { ...settings, model, model_name: name, memory, context } });
    if (body.conversation && conversation?.id === body.conversation)
      change({ conversation: { ...conversation, choice: loading.choice ?? null } });
    takeModel(loading);
    dialog.close();
    document.getElementById("prompt").focus();
  } catch (failure) {
    report(failure);
  }
}

async function unload() {
  await api.unloadModel().catch(report);
}
