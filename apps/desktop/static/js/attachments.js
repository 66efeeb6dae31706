// The files of the message that is being written: attached by button, drop or paste, kept for later, removed.

import * as api from "./api.js";
import { countSoon, tokensOf } from "./counting.js";
import { announce, h, iconButton } from "./dom.js";
import { chip, isKept } from "./files.js";
import { size } from "./format.js";
import { createKept, refreshKept } from "./kept.js";
import { follow, get } from "./store.js";
import { report, toast } from "./toast.js";

const MOST = 10;
const MOST_BYTES = 16e6;
// Shorter files are read again as quickly.
const WORTH_KEEPING_TOKENS = 256;
const KINDS = ".txt,.md,.markdown,.csv,.tsv,.json,.xml,.html,.log,.py,.js,.ts,.c,.h,.cpp,.java,.rs,.go,.sh,.yaml,.yml,.toml,.ini,.tex,.srt,.pdf,text/*,application/pdf";

// Of the draft on show: {name, bytes} while a file is read, what the server says of it afterwards.
let files = [];
let reading = new Map();
// Files that the model is reading, to keep them: what ends that, by id.
const keeping = new Map();
let key = null;
let changed = () => {};

/** Makes the row of chips and the button; `onchange` is called when what can be sent may have changed. */
export function createAttachments({ onchange }) {
  changed = onchange;
  const chips = h("ul", { class: "chips", "aria-label": "Attached files", hidden: true });
  const input = h("input", { type: "file", multiple: true, accept: KINDS, hidden: true, "aria-label": "Files to attach" });
  input.addEventListener("change", () => {
    attach([...input.files]);
    input.value = "";
  });
  const button = iconButton("attach", "Attach files", () => input.click(), { title: "Attach text or PDF files" });
  parts = { chips };
  enableDropping();
  follow(["kept"], ({ kept }) => {
    if (kept) setFiles(files.filter((file) => !file.document || isKept(file)));
  });
  const keptButton = createKept({ attach: attachKept, holds: (id) => files.some((file) => file.id === id) });
  return { chips, button, input, kept: keptButton };
}

let parts = null;

/** Attaches what the user chose, dropped or pasted. */
export function attach(chosen) {
  for (const file of chosen) {
    if (files.length + reading.size >= MOST) {
      toast(`A message takes at most ${MOST} files.`);
      break;
    }
    if (file.size > MOST_BYTES) {
      toast(`${file.name} has ${size(file.size)}; at most ${size(MOST_BYTES)} can be attached.`, {
        hint: "Attach a part of it.",
      });
    } else read(file);
  }
  show();
}

async function read(file) {
  const own = { key, stop: new AbortController(), file };
  reading.set(own, own);
  try {
    const made = await api.attach(file, own.stop.signal);
    if (own.key === key) files = [...files, made];
    else keep(own.key, [...kept(own.key), made]);
    announce(`${file.name} is attached.`);
  } catch (failure) {
    if (failure.name !== "AbortError") report(failure);
  }
  reading.delete(own);
  show();
}

/** Attaches a file that is kept, which need not be sent again. */
function attachKept(file) {
  if (files.length + reading.size >= MOST) {
    toast(`A message takes at most ${MOST} files.`);
    return;
  }
  setFiles([...files, file]);
  announce(`${file.name} is attached.`);
}

/** Has the model read a file now, and keeps it for later conversations. */
async function keepForLater(file) {
  const stop = new AbortController();
  keeping.set(file.id, stop);
  show({ recount: false });
  try {
    const made = await api.keepAttachment(file.id, get().conversation?.id ?? null, stop.signal);
    await refreshKept();
    files = files.map((other) => (other.id === made.id ? made : other));
    announce(`${file.name} is kept.`);
  } catch (failure) {
    if (failure.name !== "AbortError") report(failure);
  }
  keeping.delete(file.id);
  show();
}

function remove(file) {
  files = files.filter(({ id }) => id !== file.id);
  api.discardAttachment(file.id).catch(report);
  announce(`${file.name} is removed.`);
  show();
  document.getElementById("prompt").focus();
}

/** The files to send; null while one of them is still being read. */
export function attached() {
  return reading.size || files.some(({ id }) => keeping.has(id)) ? null : files;
}

/** Takes the files off the draft, which is being sent; `restore` puts them back. */
export function take() {
  const taken = files;
  files = [];
  show();
  return { ids: taken.map(({ id }) => id), restore: () => setFiles(taken) };
}

/** Each conversation has its own unsent files. */
export function showDraft(wanted, { fresh }) {
  key = wanted;
  if (!fresh) setFiles(kept(key));
}

/** The files of the draft, but for those that are still being read. */
export const draftFiles = () => files;

/** Shows the files again: it has been counted what they take. */
export const showFiles = () => show({ recount: false });

function setFiles(wanted) {
  files = wanted;
  show();
}

function show({ recount = true } = {}) {
  keep(key, files);
  if (recount) countSoon();
  const { chips } = parts;
  const waiting = [...reading.values()].filter((own) => own.key === key);
  chips.hidden = !files.length && !waiting.length;
  chips.replaceChildren(
    ...files.map(draftChip),
    ...waiting.map((own) =>
      chip({ name: own.file.name }, { state: "Reading…", remove: () => own.stop.abort() }),
    ),
  );
  changed();
}

function draftChip(file) {
  const stop = keeping.get(file.id);
  if (stop) return chip(file, { state: "The model reads it…", remove: () => stop.abort() });
  const tokens = file.tokens ?? tokensOf(file.id);
  const worth = !file.document && tokens >= WORTH_KEEPING_TOKENS;
  const why = worth && get().model?.not_apart;
  return chip(file, {
    tokens,
    remove: () => remove(file),
    keep: worth && !why && (() => keepForLater(file)),
    note: why && `It cannot be kept for later conversations. ${why}`,
  });
}

const kept = (draft) => JSON.parse(sessionStorage.getItem(`files:${draft}`) ?? "[]");

function keep(draft, wanted) {
  if (wanted.length) sessionStorage.setItem(`files:${draft}`, JSON.stringify(wanted));
  else sessionStorage.removeItem(`files:${draft}`);
}

/** Files may be dropped anywhere on the conversation. */
function enableDropping() {
  const main = document.getElementById("main");
  const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  // Children tell of entering and leaving too.
  let depth = 0;
  const mark = (by) => {
    depth = by === 0 ? 0 : Math.max(0, depth + by);
    main.classList.toggle("dropping", depth > 0);
  };
  main.addEventListener("dragenter", (event) => holdsFiles(event) && mark(1));
  main.addEventListener("dragleave", (event) => holdsFiles(event) && mark(-1));
  document.addEventListener("dragover", (event) => holdsFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!holdsFiles(event)) return;
    // Elsewhere the browser would leave the page to show the file.
    event.preventDefault();
    mark(0);
    if (main.contains(event.target)) attach([...event.dataTransfer.files]);
  });
}
