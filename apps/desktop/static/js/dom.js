// Makes elements and icons; knows nothing of what they mean.

/** An element with attributes, listeners (`onclick: f`) and children; null, undefined and false are left out. */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** An element of SVG. */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** One of the drawings of icons.svg; its meaning is told by the label of what holds it. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}

/** A button that shows only an icon; the label is its name and its tooltip. */
export function iconButton(name, label, onclick, attributes = {}) {
  const { class: extra, ...rest } = attributes;
  const kind = extra ? `icon-button ${extra}` : "icon-button";
  return h("button", { type: "button", class: kind, "aria-label": label, title: label, onclick, ...rest }, icon(name));
}

/** Shows how much is done; `part` is 0 to 1, or null where that is not known. */
export function progressBar(label) {
  const filled = h("span");
  const bar = h(
    "div",
    { class: "progress", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 },
    filled,
  );
  return {
    element: bar,
    show(part) {
      bar.classList.toggle("unknown", part === null);
      filled.style.width = part === null ? "" : `${(100 * part).toFixed(1)}%`;
      if (part === null) bar.removeAttribute("aria-valuenow");
      else bar.setAttribute("aria-valuenow", Math.round(100 * part));
    },
  };
}

/** Says something to screen readers without showing it. */
export function announce(text) {
  const region = document.getElementById("announcer");
  region.textContent = "";
  // A region that is emptied and filled in one go is not read again where the text is the same.
  requestAnimationFrame(() => {
    region.textContent = text;
  });
}
