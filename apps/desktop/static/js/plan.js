// A plan drawn: a bar of what needs memory, what was chosen, what was given up; knows nothing of how it was asked for.

import { h, icon } from "./dom.js";
import { count, counted, megabytes, rate, size } from "./format.js";
import { withSlack } from "./budget.js";

const GROUPS = [
  { name: "weights", label: "Weights", terms: ["weights_packed", "weights_mapped", "experts"] },
  { name: "cache", label: "KV cache", terms: ["kv", "prefix_cache", "sequences"] },
  { name: "drafting", label: "Speculative decoding", terms: ["drafting", "draft_model"] },
  { name: "work", label: "Working memory", terms: ["activations", "session", "loading"] },
  { name: "text", label: "Tokenizer", terms: ["tokenizer"] },
  { name: "program", label: "Program and libraries", terms: ["interpreter", "objects", "libraries", "code", "reserve"] },
];
const OTHER = { name: "other", label: "Other", terms: [] };
const TERMS = {
  kv: "KV cache",
  prefix_cache: "KV cache of earlier prompts",
  sequences: "KV cache of other replies",
  interpreter: "Python",
  objects: "program",
  weights_mapped: "weights, mapped from the file",
  weights_packed: "weights, packed in memory",
};
// How the KV cache stores its numbers, and where the weights are.
const KV = { float32: "32 bits", float16: "16 bits", int8: "8 bits", int4: "4 bits" };
const WEIGHTS = { mapped: "read from the file as needed", packed: "copied into memory" };
// A budget much larger than the plan would leave no room in the bar for the plan.
const WIDEST = 1.6;

/** A view of plans; `wish` is called with the budget that a button proposes. */
export function createPlanView(wish) {
  const verdict = h("div", { class: "verdict", role: "status", id: "verdict" });
  const parts = [...GROUPS, OTHER].map((group) => ({ ...group, element: h("span", { class: `part-${group.name}` }) }));
  const row = h(
    "div",
    { class: "segments-row" },
    parts.map(({ element }) => element),
  );
  const limit = h("div", { class: "limit" });
  const over = h("div", { class: "over" });
  const bar = h("div", { class: "bar", role: "img", id: "plan-bar" }, row, over, limit);
  const legend = h("ul", { class: "legend" });
  const more = h("div", { class: "plan-result" });
  const figure = h("div", {}, bar, legend);
  const element = h("div", { class: "plan-result" }, verdict, figure, more);
  return {
    element,
    show(plan, machine) {
      figure.hidden = more.hidden = false;
      verdict.className = plan.fits ? "verdict" : "verdict short";
      verdict.replaceChildren(...verdictOf(plan, machine, wish));
      const grouped = groupTerms(plan.terms, parts);
      drawBar(plan, grouped, { bar, over, limit });
      legend.replaceChildren(...grouped.filter(({ bytes }) => bytes > 0).map(legendEntry));
      more.replaceChildren(...details(plan));
    },
    showError({ message, hint }) {
      figure.hidden = more.hidden = true;
      verdict.className = "verdict broken";
      verdict.replaceChildren(icon("warning"), h("span", { class: "text" }, message, hint && h("small", {}, hint)));
    },
    showNothing() {
      figure.hidden = more.hidden = true;
      verdict.className = "verdict";
      verdict.replaceChildren(h("span", { class: "text" }, "Planning…"));
    },
  };
}

function verdictOf(plan, machine, wish) {
  const needs = size(plan.planned_bytes);
  if (!plan.fits) {
    const enough = withSlack(plan.minimum_bytes);
    return [
      icon("warning"),
      h(
        "span",
        { class: "text" },
        "Does not fit",
        h("small", {}, `It needs at least ${size(plan.minimum_bytes)}.`),
      ),
      h("button", { type: "button", class: "button small", onclick: () => wish(enough) }, `Use ${size(enough)}`),
    ];
  }
  if (plan.budget_bytes) {
    const spare = size(Math.max(0, plan.budget_bytes - plan.planned_bytes));
    return [
      icon("check"),
      h(
        "span",
        { class: "text" },
        `Fits: ${needs} of ${size(plan.budget_bytes)}`,
        h("small", {}, `${spare} to spare.`),
      ),
    ];
  }
  const free = machine?.available_bytes;
  const scarce = free && plan.planned_bytes > free;
  const note = scarce
    ? `Only ${size(free)} are free on this computer.`
    : free
      ? `${size(free)} are free on this computer.`
      : "";
  return [icon(scarce ? "warning" : "check"), h("span", { class: "text" }, `Needs ${needs}`, h("small", {}, note))];
}

function groupTerms(terms, parts) {
  const known = new Set(GROUPS.flatMap((group) => group.terms));
  const others = Object.keys(terms).filter((name) => !known.has(name));
  return parts.map((part) => {
    const names = part.name === OTHER.name ? others : part.terms;
    return { ...part, bytes: names.reduce((sum, name) => sum + (terms[name] ?? 0), 0) };
  });
}

function drawBar(plan, grouped, { bar, over, limit }) {
  const total = grouped.reduce((sum, { bytes }) => sum + bytes, 0);
  const budget = plan.budget_bytes;
  const scale = budget ? Math.max(total, Math.min(budget, total * WIDEST)) : total;
  for (const { element, bytes, label } of grouped) {
    element.hidden = bytes === 0;
    element.style.width = `${(100 * bytes) / scale}%`;
    element.title = `${label}: ${megabytes(bytes)}`;
  }
  limit.hidden = !budget || budget > scale;
  bar.classList.toggle("with-limit", !limit.hidden);
  over.hidden = !budget || budget >= total;
  over.style.left = `${(100 * budget) / scale}%`;
  if (!limit.hidden) {
    limit.style.left = `calc(${(100 * budget) / scale}% - 1px)`;
    limit.dataset.label = `budget ${size(budget)}`;
    limit.classList.toggle("at-start", budget / scale < 0.35);
  }
  const shown = grouped.filter(({ bytes }) => bytes > 0).map(({ label, bytes }) => `${label} ${megabytes(bytes)}`);
  bar.setAttribute("aria-label", `Planned memory ${size(total)}: ${shown.join(", ")}`);
}

function legendEntry({ name, label, bytes }) {
  return h(
    "li",
    {},
    h("span", { class: `swatch part-${name}` }),
    label,
    h("span", { class: "size" }, megabytes(bytes)),
  );
}

function details(plan) {
  const given = plan.given_up ?? [];
  return [
    h("section", {}, h("h4", {}, "Chosen"), choiceList(plan)),
    given.length > 0 &&
      h(
        "section",
        {},
        h("h4", {}, plan.fits ? "Given up to fit" : "Given up, but still not enough"),
        h(
          "ul",
          { class: "given" },
          given.map((text) => h("li", {}, text)),
        ),
      ),
    moreOf(plan),
  ].filter(Boolean);
}

function choiceList({ choice, speed }) {
  const drafters = choice.drafters ?? [];
  const rows = [
    ["Context", `${count(choice.context)} tokens`],
    [
      "Speculative decoding",
      drafters.length ? `up to ${counted(choice.draft_max, "drafted token")} at a time, with the same text` : "off",
    ],
    speed && [
      "Speed",
      `${speed.measured ? "" : "about "}${rate(speed.tokens_per_second)}${speed.measured ? ", measured here" : ", estimated until it has run here"}`,
    ],
  ].filter(Boolean);
  return definitions(rows);
}

function definitions(rows) {
  return h(
    "dl",
    { class: "choice" },
    rows.flatMap(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]),
  );
}

/** What few people want to know. */
function moreOf({ choice, terms, speculation_bytes: drafting, best_speed_bytes: best }) {
  const rows = [
    ["KV cache", KV[choice.kv] ?? choice.kv],
    [
      "Weights",
      choice.window_layers
        ? `read from the file, ${counted(choice.window_layers, "layer")} at a time`
        : (WEIGHTS[choice.weights] ?? choice.weights),
    ],
    drafting && ["Speculative decoding", `pays from a budget of ${size(drafting)}`],
    best && ["95% of the best speed", `from a budget of ${size(best)}`],
  ].filter(Boolean);
  return h("details", {}, h("summary", {}, "Details"), definitions(rows), termsTable(terms));
}

function termsTable(terms) {
  const rows = Object.entries(terms)
    .filter(([, bytes]) => bytes > 0)
    .sort(([, a], [, b]) => b - a)
    .map(([name, bytes]) =>
      h("tr", {}, h("td", {}, TERMS[name] ?? name.replaceAll("_", " ")), h("td", {}, megabytes(bytes))),
    );
  return h("table", { class: "terms" }, h("tbody", {}, rows));
}
