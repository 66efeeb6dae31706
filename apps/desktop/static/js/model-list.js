// The models that were found, as a list to choose from; knows nothing of plans.

import { h } from "./dom.js";
import { bits, count, parameters, size } from "./format.js";

const SOURCES = {
  "built-in": "Built in",
  converted: "Downloaded",
  hub: "Downloaded",
  imported: "From this computer",
  bundle: "From this computer",
  gguf: "From this computer",
};
const ORDER = Object.keys(SOURCES);

/** The list; `chosen` is called with the model. */
export function createModelList(chosen) {
  const element = h("div", { class: "model-list", role: "listbox", "aria-label": "Models" });
  element.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const options = [...element.querySelectorAll("[role=option]")];
    const next = step && options[options.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.click();
  });
  return {
    element,
    wait() {
      element.replaceChildren(h("p", { class: "looking", role: "status" }, "Looking for models…"));
    },
    show(models, selected, present) {
      const focused = element.contains(document.activeElement);
      const children = [];
      let heading = null;
      const place = ({ source }) => ORDER.findIndex((one) => SOURCES[one] === SOURCES[source]);
      for (const model of models.toSorted((a, b) => place(a) - place(b))) {
        const source = SOURCES[model.source] ?? model.source;
        if (source !== heading) children.push(h("h3", { role: "presentation" }, source));
        heading = source;
        children.push(entry(model, model.id === selected, present, () => chosen(model)));
      }
      element.replaceChildren(...children);
      if (focused) element.querySelector("[aria-selected=true]")?.focus();
    },
  };
}

function entry(model, selected, present, onclick) {
  const facts = [
    parameters(model.parameters),
    bits(model.bits_per_weight),
    model.context && `${count(model.context)} context`,
    model.bytes && size(model.bytes),
  ]
    .filter(Boolean)
    .join(" · ");
  const state = present?.id === model.id && { ready: "loaded", loading: "loading" }[present.status];
  return h(
    "button",
    {
      type: "button",
      class: "model",
      role: "option",
      "aria-selected": String(selected),
      tabindex: selected ? 0 : -1,
      title: model.id,
      onclick,
    },
    h("span", { class: "top" }, h("span", { class: "name" }, model.name), state && h("span", { class: "tag" }, state)),
    model.place && h("span", { class: "facts" }, model.place),
    h("span", { class: "facts" }, facts),
    model.error && h("span", { class: "broken" }, model.error.message ?? model.error),
  );
}
