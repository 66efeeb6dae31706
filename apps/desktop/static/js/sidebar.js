// The list of conversations: new, search, rename, export, delete, import, and the theme.

import { exportAddress } from "./api.js";
import { importFile, refreshList, remove, show, update } from "./chats.js";
import { h, icon, iconButton } from "./dom.js";
import { date, day } from "./format.js";
import { createMenu } from "./menu.js";
import { openShortcuts } from "./shortcuts.js";
import { change, follow, get } from "./store.js";
import { createThemeSwitch } from "./theme.js";

const NARROW = window.matchMedia("(max-width: 820px)");
const SEARCH_WAIT_MS = 150;

let search = null;
let list = null;

/** Fills the sidebar. */
export function createSidebar() {
  const sidebar = document.getElementById("sidebar");
  const fresh = h(
    "button",
    {
      type: "button",
      class: "button new-chat",
      onclick: () => {
        show(null);
        closeDrawer();
      },
    },
    icon("compose"),
    "New chat",
  );
  search = h("input", {
    type: "search",
    class: "input",
    placeholder: "Search",
    "aria-label": "Search conversations",
    autocomplete: "off",
    spellcheck: "false",
  });
  const chooser = createChooser();
  list = h("nav", { class: "conversations", "aria-label": "Conversations" });
  sidebar.append(
    h(
      "div",
      { class: "sidebar-head" },
      h("div", { class: "brand" }, h("img", { src: "favicon.svg", alt: "" }), "edgeinfer"),
      iconButton("close", "Close the conversations", closeDrawer, { class: "drawer-close" }),
    ),
    h("div", { class: "sidebar-tools" }, fresh, h("div", { class: "search" }, icon("search"), search)),
    list,
    h(
      "div",
      { class: "sidebar-foot" },
      createThemeSwitch(),
      iconButton("upload", "Import a conversation", () => chooser.click()),
      chooser,
      iconButton("keyboard", "Keyboard shortcuts", openShortcuts),
    ),
  );
  watchSearch();
  document.getElementById("scrim").addEventListener("click", closeDrawer);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) closeDrawer();
  });
  if (localStorage.getItem("sidebar") === "closed") app().classList.add("without-sidebar");
  follow(["conversations", "removed", "conversation"], render);
}

/** The field, never seen itself, that opens the system's dialog of files. */
function createChooser() {
  const kinds = ".json,application/json";
  const chooser = h("input", { type: "file", accept: kinds, hidden: true, "aria-label": "Conversation to import" });
  chooser.addEventListener("change", async () => {
    if (chooser.files[0]) await importFile(chooser.files[0]);
    chooser.value = "";
  });
  return chooser;
}

const app = () => document.getElementById("app");

/** Shows or hides the sidebar; in narrow windows it lies over the messages. */
export function toggleSidebar() {
  if (NARROW.matches) {
    const open = app().classList.toggle("with-drawer");
    document.getElementById("main").inert = open;
    if (open) search.focus();
    return;
  }
  const closed = app().classList.toggle("without-sidebar");
  localStorage.setItem("sidebar", closed ? "closed" : "open");
}

function closeDrawer() {
  if (!app().classList.contains("with-drawer")) return;
  app().classList.remove("with-drawer");
  document.getElementById("main").inert = false;
  document.getElementById("sidebar-button").focus();
}

/** Opens the sidebar where it is closed and puts the cursor into the search. */
export function focusSearch() {
  const hidden = NARROW.matches
    ? !app().classList.contains("with-drawer")
    : app().classList.contains("without-sidebar");
  if (hidden) toggleSidebar();
  search.focus();
  search.select();
}

function watchSearch() {
  let wait = 0;
  search.addEventListener("input", () => {
    clearTimeout(wait);
    wait = setTimeout(() => {
      change({ search: search.value.trim() });
      refreshList();
    }, SEARCH_WAIT_MS);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") list.querySelector("a")?.focus();
    else if (event.key === "Escape" && search.value) {
      event.stopPropagation();
      search.value = "";
      search.dispatchEvent(new Event("input"));
    }
  });
}

function render({ conversations, removed, conversation, search: wanted }) {
  // A title that is being written must not vanish because something else changed.
  if (list.querySelector("input")) return;
  const focused = document.activeElement?.closest?.(".entry")?.dataset.id;
  const shown = (conversations ?? []).filter(({ id }) => !removed.has(id));
  const children = [];
  let heading = null;
  for (const entry of shown) {
    const when = wanted ? "Found" : day(date(entry.updated));
    if (when !== heading) children.push(h("h3", {}, when));
    heading = when;
    children.push(entryOf(entry, entry.id === conversation?.id, wanted));
  }
  if (!shown.length && conversations)
    children.push(h("p", { class: "none" }, wanted ? "Nothing found." : "Conversations are kept here."));
  list.replaceChildren(...children);
  if (focused) list.querySelector(`[data-id="${CSS.escape(focused)}"] a`)?.focus();
}

function entryOf({ id, title, snippet }, current, wanted) {
  const name = title || "New chat";
  const link = h(
    "a",
    { href: `#/chat/${id}`, title: name, "aria-current": current ? "page" : null, onclick: closeDrawer },
    h("span", { class: "title" }, name),
    snippet && h("span", { class: "snippet" }, marked(snippet, wanted)),
  );
  const element = h("div", { class: current ? "entry current" : "entry", "data-id": id }, link);
  link.addEventListener("dblclick", (event) => {
    event.preventDefault();
    rename(element, id, name);
  });
  link.addEventListener("keydown", (event) => {
    if (event.key === "F2") rename(element, id, name);
    else if (event.key === "Delete") remove(id, name);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") step(event, link);
  });
  element.append(
    createMenu(
      "more",
      `Menu of ${name}`,
      () => [
        { icon: "edit", text: "Rename", run: () => rename(element, id, name) },
        { icon: "download", text: "Export as Markdown", href: exportAddress(id, "markdown") },
        { icon: "download", text: "Export as JSON", href: exportAddress(id, "json") },
        null,
        { icon: "trash", text: "Delete", danger: true, run: () => remove(id, name) },
      ],
      { class: "small" },
    ),
  );
  return element;
}

function step(event, link) {
  event.preventDefault();
  const links = [...list.querySelectorAll("a")];
  const next = links[links.indexOf(link) + (event.key === "ArrowDown" ? 1 : -1)];
  (next ?? (event.key === "ArrowUp" ? search : link)).focus();
}

/** The snippet with what was searched for marked. */
function marked(snippet, wanted) {
  const at = wanted ? snippet.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  if (at < 0) return [snippet];
  const end = at + wanted.length;
  return [snippet.slice(0, at), h("mark", {}, snippet.slice(at, end)), snippet.slice(end)];
}

/** Renames a conversation where it is listed. */
export function renameInList(id) {
  if (NARROW.matches || app().classList.contains("without-sidebar")) focusSearch();
  const element = list.querySelector(`[data-id="${CSS.escape(id)}"]`);
  const entry = get().conversations?.find((other) => other.id === id);
  if (element && entry) rename(element, id, entry.title);
}

function rename(element, id, title) {
  const field = h("input", { class: "input", value: title, "aria-label": "Title", maxlength: 200 });
  let done = false;
  const finish = (keep) => {
    if (done) return;
    done = true;
    const text = field.value.trim();
    field.remove();
    if (keep && text && text !== title) update(id, { title: text });
    render(get());
    list.querySelector(`[data-id="${CSS.escape(id)}"] a`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finish(true);
    else if (event.key === "Escape") {
      event.stopPropagation();
      finish(false);
    }
  });
  field.addEventListener("blur", () => finish(true));
  element.replaceChildren(field);
  field.focus();
  field.select();
}
