// The memory budget's switch, slider and field; knows nothing of plans.

import { h } from "./dom.js";
import { parseSize, size } from "./format.js";

const STEPS = 400;
const DIGITS = 3;
const SLACK = 1.02;

/** A budget that surely holds `bytes`: what a process needs differs a little from one moment to the next. */
export function withSlack(bytes) {
  return Math.ceil((bytes * SLACK) / 1e6) * 1e6;
}

/** The control; `changed` is called with bytes, or null for no budget. */
export function createBudget(changed) {
  let least = 50e6;
  let most = 8e9;
  let bytes = null;
  const limited = h("input", { type: "checkbox", id: "budget-switch" });
  const field = h("input", { type: "text", class: "input number", id: "budget-size", "aria-label": "Memory budget", inputmode: "decimal", autocomplete: "off" });
  const slider = h("input", { type: "range", class: "slider", id: "budget-slider", "aria-label": "Memory budget", min: 0, max: STEPS, step: 1 });
  const low = h("span");
  const high = h("span");
  const range = h("div", { class: "range" }, slider, h("div", { class: "scale" }, low, high));
  // Budgets of small and large models differ a hundredfold, so the slider goes by factors.
  const at = (step) => least * (most / least) ** (step / STEPS);
  const stepOf = (value) => Math.round((STEPS * Math.log(value / least)) / Math.log(most / least));

  function show() {
    limited.checked = bytes !== null;
    field.hidden = range.hidden = bytes === null;
    const value = bytes ?? most;
    slider.value = stepOf(value);
    slider.style.setProperty("--filled", `${(100 * slider.value) / STEPS}%`);
    slider.setAttribute("aria-valuetext", size(value));
    if (document.activeElement !== field) field.value = bytes === null ? "" : size(bytes);
    field.setAttribute("aria-invalid", "false");
    low.textContent = size(round(least));
    high.textContent = size(round(most));
  }
  function take(value) {
    bytes = value;
    show();
    changed(bytes);
  }

  limited.addEventListener("change", () => take(limited.checked ? round(at(STEPS / 2)) : null));
  slider.addEventListener("input", () => take(round(at(slider.value))));
  const typed = () => {
    const value = parseSize(field.value);
    field.setAttribute("aria-invalid", String(value === null));
    if (value !== null) take(value);
  };
  field.addEventListener("change", () => { typed(); if (parseSize(field.value) !== null && bytes !== null) field.value = size(bytes); });
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); typed(); } });

  const element = h("div", { class: "budget" },
    h("div", { class: "row" },
      h("label", { class: "switch" }, limited, h("span", { class: "track" }), "Keep to a memory budget"), field),
    range);
  return {
    element,
    /** Sets the slider's ends and the budget, without `changed` being called. */
    set(ends, value) {
      least = ends.least;
      most = Math.max(ends.most, ends.least * 2);
      bytes = value;
      show();
    },
  };
}

function round(bytes) {
  const digits = Math.max(1e6, 10 ** (Math.floor(Math.log10(bytes)) + 1 - DIGITS));
  return Math.round(bytes / digits) * digits;
}
