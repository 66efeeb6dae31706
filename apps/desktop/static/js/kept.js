// Files that are kept for later conversations: the sheet that lists them, from which they are attached and removed.

import * as api from "./api.js";
import { announce, h, icon, iconButton } from "./dom.js";
import { factsOf } from "./files.js";
import { size } from "./format.js";
import { change, follow, get } from "./store.js";
import { report } from "./toast.js";

let sheet = null;
let list = null;
let note = null;
let draft = null;
// Of the file that a second press removes.
let sure = null;

/** Makes the button that opens the list; `draft` attaches a file, and knows whether it `holds` one. */
export function createKept(wanted) {
  draft = wanted;
  sheet = document.getElementById("kept");
  list = h("ul", { class: "kept-list" });
  note = h("p", { class: "viewer-note" });
  sheet.append(
    h(
      "div",
      { class: "dialog-head" },
      h("h2", { id: "kept-title" }, "Kept files"),
      iconButton("close", "Close", () => sheet.close()),
    ),
    note,
    list,
  );
  sheet.addEventListener("click", (event) => {
    if (event.target === sheet) sheet.close();
  });
  const button = iconButton("keep", "Kept files", () => {
    sure = null;
    // What is on the disk changes without being told of.
    refreshKept();
    sheet.showModal();
  });
  follow(["kept", "model"], ({ kept }) => {
    button.hidden = !kept?.length;
    show();
  });
  return button;
}

/** Reads again which files are kept. */
export async function refreshKept() {
  try {
    change(await api.listKept());
  } catch (failure) {
    if (!failure.gone) report(failure);
  }
}

function show() {
  const { kept, model } = get();
  note.textContent = model?.not_apart
    ? `This model reads them as part of the message. ${model.not_apart}`
    : "The model need not read these again. Replies about several of them are approximate: each was read apart.";
  list.replaceChildren(...(kept ?? []).map(row));
  if (!kept?.length) sheet.close();
}

function row(file) {
  const stored = file.kept_bytes ? `${size(file.kept_bytes)} on the disk` : "is read again when used";
  const held = draft.holds(file.id);
  return h(
    "li",
    {},
    h(
      "span",
      { class: "text" },
      h("span", { class: "name", title: file.name }, file.name),
      h("span", { class: "facts" }, [...factsOf(file, file.tokens), stored].join(" · ")),
    ),
    h(
      "button",
      {
        type: "button",
        class: "button small",
        disabled: held,
        "aria-label": `Attach ${file.name}`,
        onclick: () => {
          draft.attach(file);
          sheet.close();
        },
      },
      held ? "Attached" : "Attach",
    ),
    sure === file.id
      ? h("button", { type: "button", class: "button small danger", onclick: () => remove(file) }, icon("trash"), "Remove?")
      : iconButton("trash", `Remove ${file.name}`, () => ask(file), { class: "small" }),
  );
}

/** A second press confirms. */
function ask(file) {
  sure = file.id;
  show();
  list.querySelector(".danger").focus();
}

async function remove(file) {
  try {
    await api.removeKept(file.id);
    announce(`${file.name} is removed.`);
    await refreshKept();
  } catch (failure) {
    report(failure);
  }
}
