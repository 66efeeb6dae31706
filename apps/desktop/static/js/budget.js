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
  const parts = createParts();
  const { limited, field, slider } = parts;
  const scale = { least: 50e6, most: 8e9 };
  let bytes = null;
  const take = (value) => {
    bytes = value;
    show(parts, scale, bytes);
    changed(bytes);
  };
  const typed = () => {
    const value = parseSize(field.value);
    field.setAttribute("aria-invalid", String(value === null));
    if (value !== null) take(value);
    return value !== null;
  };
  limited.addEventListener("change", () => take(limited.checked ? round(bytesAt(scale, STEPS / 2)) : null));
  slider.addEventListener("input", () => take(round(bytesAt(scale, slider.value))));
  field.addEventListener("change", () => {
    if (typed()) field.value = size(bytes);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    typed();
  });
  return {
    element: parts.element,
    /** Sets the slider's ends and the budget, without `changed` being called. */
    set({ least, most }, value) {
      Object.assign(scale, { least, most: Math.max(most, least * 2) });
      bytes = value;
      show(parts, scale, bytes);
    },
  };
}

// Budgets of small and large models differ a hundredfold, so the slider goes by factors.
const bytesAt = ({ least, most }, step) => least * (most / least) ** (step / STEPS);
const stepAt = ({ least, most }, bytes) => Math.round((STEPS * Math.log(bytes / least)) / Math.log(most / least));

function createParts() {
  const label = "Memory budget";
  const limited = h("input", { type: "checkbox", id: "budget-switch" });
  const typing = { inputmode: "decimal", autocomplete: "off" };
  const field = h("input", { type: "text", class: "input number", id: "budget-size", "aria-label": label, ...typing });
  const steps = { min: 0, max: STEPS, step: 1 };
  const slider = h("input", { type: "range", class: "slider", id: "budget-slider", "aria-label": label, ...steps });
  const low = h("span");
  const high = h("span");
  const range = h("div", { class: "range" }, slider, h("div", { class: "scale" }, low, high));
  const toggle = h("label", { class: "switch" }, limited, h("span", { class: "track" }), "Keep to a memory budget");
  const element = h("div", { class: "budget" }, h("div", { class: "row" }, toggle, field), range);
  return { limited, field, slider, low, high, range, element };
}

function show({ limited, field, slider, low, high, range }, scale, bytes) {
  limited.checked = bytes !== null;
  field.hidden = range.hidden = bytes === null;
  const value = bytes ?? scale.most;
  slider.value = stepAt(scale, value);
  slider.style.setProperty("--filled", `${(100 * slider.value) / STEPS}%`);
  slider.setAttribute("aria-valuetext", size(value));
  if (document.activeElement !== field) field.value = bytes === null ? "" : size(bytes);
  field.setAttribute("aria-invalid", "false");
  low.textContent = size(round(scale.least));
  high.textContent = size(round(scale.most));
}

function round(bytes) {
  const digits = Math.max(1e6, 10 ** (Math.floor(Math.log10(bytes)) + 1 - DIGITS));
  return Math.round(bytes / digits) * digits;
}
