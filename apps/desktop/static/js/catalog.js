// Models that can be had: the catalog as cards, the hub's answers to a search; knows nothing of those already here.

import * as api from "./api.js";
import { h, icon, iconButton } from "./dom.js";
import { createFetch } from "./fetching.js";
import { counted, parameters, size } from "./format.js";
import { change, follow, get } from "./store.js";
import { report } from "./toast.js";

const FITS = {
  yes: ["fits", "Runs well here"],
  tight: ["tight", "Needs most of the free memory"],
  no: ["large", "Too large for this computer"],
};
const NEEDS_LLAMA = "Needs the native kernel or llama.cpp, and neither is installed";
const NAMED = /^[\w.-]+\/[\w.-]+(:[\w.-]+)?$/;

// The fetching parts on show, brought up to date with the downloads.
const fetches = new Set();
follow(["downloads"], () => {
  for (const fetch of fetches) {
    if (fetch.element.isConnected) fetch.update();
    else if (fetch.shown) fetches.delete(fetch);
  }
});

function fetchPart(options) {
  const fetch = createFetch(options);
  fetches.add(fetch);
  fetch.update();
  // Not yet on the page, and not to be forgotten for that.
  requestAnimationFrame(() => {
    fetch.shown = true;
  });
  return fetch.element;
}

/** Reads the catalog again: what fits and what is here may have changed. */
export async function refreshCatalog() {
  try {
    change({ catalog: await api.getCatalog() });
  } catch (failure) {
    if (!failure.gone) report(failure);
  }
}

/** A model of the catalog; `use` is called with the path once it is here. */
export function card(model, room, use) {
  const [kind, text] = FITS[model.fit];
  const lacks = model.gguf && !room.gguf;
  const refusal = model.fit === "no" ? text : lacks ? NEEDS_LLAMA : room.disk_bytes < model.download ? noDisk(room) : "";
  const facts = [
    `${parameters(model.parameters)} parameters`,
    `${size(model.download)} to download`,
    model.licence,
  ];
  return h(
    "article",
    { class: "card", "aria-label": model.name },
    h("h4", {}, model.name, h("span", { class: `fit ${kind}`, title: text }, `needs ${size(model.memory)}`)),
    h("p", {}, sentence(model.purpose)),
    h("p", { class: "facts" }, separated(facts)),
    fetchPart({ id: model.name, path: model.path, refusal, use }),
  );
}

/** Facts in a line that breaks between them only. */
const separated = (facts) => facts.flatMap((text, place) => [place ? " · " : null, h("span", {}, text)]);

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;
const noDisk = ({ disk_bytes: free }) => `Only ${size(free)} are free on the disk`;

/** The pane of models that can be had; `use` is called with the path of one that is here. */
export function createCatalogPane(use) {
  const field = h("input", {
    type: "search",
    class: "input",
    id: "hub-search",
    placeholder: "Search, or owner/name on Hugging Face",
    "aria-label": "Search models",
    autocomplete: "off",
    autocapitalize: "off",
    spellcheck: "false",
  });
  const search = h("form", { class: "hub-search" }, icon("search"), field, h("button", { type: "submit", class: "button" }, "Search the hub"));
  const cards = h("div", { class: "cards" });
  const found = h("div", { class: "found", "aria-live": "polite" });
  const foot = h("p", { class: "pane-foot" });
  const element = h("div", { class: "catalog-pane" }, search, h("div", { class: "catalog-scroll" }, cards, found), foot);
  const show = () => {
    const { catalog } = get();
    if (catalog) showCards(cards, catalog, field.value, use);
    foot.textContent = catalog ? roomText(catalog.room) : "";
  };
  follow(["catalog"], show);
  field.addEventListener("input", () => {
    show();
    if (!field.value.trim()) found.replaceChildren();
  });
  search.addEventListener("submit", (event) => {
    event.preventDefault();
    searchHub(field.value.trim(), found, use);
  });
  return { element, focus: () => field.focus() };
}

const roomText = ({ disk_bytes: disk, memory_bytes: memory }) =>
  `${size(disk)} are free on the disk. Models may take up to ${size(memory)} of this computer's memory.`;

function showCards(cards, { models, recommended, room }, text, use) {
  const wanted = text.trim().toLowerCase();
  const matches = ({ name, repo, purpose }) => `${name} ${repo} ${purpose}`.toLowerCase().includes(wanted);
  const first = models.filter(({ name }) => recommended.includes(name) && !wanted);
  const rest = models.filter((model) => (wanted ? matches(model) : !first.includes(model)));
  const section = (title, some) =>
    some.length > 0 && [h("h3", {}, title), h("div", { class: "card-grid" }, some.map((model) => card(model, room, use)))];
  cards.replaceChildren(
    ...[section("Good on this computer", first), section(wanted ? "In the catalog" : "All of the catalog", rest)].flat().filter(Boolean),
  );
}

async function searchHub(text, found, use) {
  if (!text) return;
  found.replaceChildren(h("h3", {}, "On Hugging Face"), h("p", { class: "none" }, "Searching…"));
  const rows = [];
  // A whole name needs no search: it is what the user wants.
  if (NAMED.test(text)) rows.push(hubRow({ name: text, kind: text.includes(":") ? "file" : "", path: null }, use));
  try {
    const { models } = await api.searchHub(text.split(":")[0]);
    rows.push(...models.filter(({ name }) => name !== text).map((model) => hubRow(model, use)));
    if (!rows.length) rows.push(h("p", { class: "none" }, "Nothing was found that runs here. Try a shorter name."));
  } catch (failure) {
    rows.push(h("p", { class: "none broken" }, [failure.message, failure.hint].filter(Boolean).join(" ")));
  }
  found.replaceChildren(h("h3", {}, "On Hugging Face"), ...rows);
}

const KINDS = { bundle: "ready to run", checkpoint: "converted after the download", gguf: "GGUF files" };

function hubRow(model, use) {
  const { name, kind, path } = model;
  const facts = [
    parameters(model.parameters),
    KINDS[kind],
    model.licence,
    model.downloads && `${counted(model.downloads, "download")} a month`,
    model.gated && "its terms have to be accepted on Hugging Face first",
  ];
  const offers = h("div", { class: "offers", hidden: true });
  const action =
    kind === "gguf"
      ? h(
          "button",
          {
            type: "button",
            class: "button small",
            "aria-expanded": "false",
            "aria-label": `Types of ${name}`,
            onclick: (event) => showOffers(event.currentTarget, name, offers, use),
          },
          "Choose a type",
        )
      : fetchPart({ id: name, path, use });
  return h(
    "article",
    { class: "hub-row", "aria-label": name },
    h("div", { class: "text" }, h("h4", {}, name), h("p", { class: "facts" }, facts.filter(Boolean).join(" · "))),
    action,
    offers,
  );
}

async function showOffers(button, name, box, use) {
  const opening = box.hidden;
  box.hidden = !opening;
  button.setAttribute("aria-expanded", String(opening));
  if (!opening || box.childElementCount) return;
  box.replaceChildren(h("p", { class: "none" }, "Asking the hub…"));
  try {
    const { offers, room } = await api.getOffers(name);
    box.replaceChildren(...offers.map((offer) => offerRow(offer, room, use)));
  } catch (failure) {
    box.replaceChildren(h("p", { class: "none broken" }, [failure.message, failure.hint].filter(Boolean).join(" ")));
  }
}

function offerRow({ name, type, bytes, memory, fit, recommended, path }, room, use) {
  const [kind, text] = FITS[fit];
  const refusal = !room.gguf ? NEEDS_LLAMA : fit === "no" ? text : room.disk_bytes < bytes ? noDisk(room) : "";
  return h(
    "div",
    { class: "offer" },
    h("strong", {}, type || name.split("/").at(-1), recommended && h("span", { class: "tag" }, "recommended")),
    h("span", { class: "facts" }, `${size(bytes)} to download`),
    h("span", { class: `fit ${kind}`, title: text }, `needs ${size(memory)}`),
    fetchPart({ id: name, path, refusal, use }),
  );
}

