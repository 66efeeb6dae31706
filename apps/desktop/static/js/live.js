// Keeps the line to the server open: what changes there without being asked for arrives here.

import * as api from "./api.js";
import { settingsSaver } from "./saving.js";
import { change, get, takeModel } from "./store.js";
import { report, toast } from "./toast.js";

const RETRY_MS = 1000;
const NOTICE_MS = 12000;

let line = null;
// What the server had to say about its start, which is said once.
const told = new Set();

/** Opens the line and keeps it open; `refresh` is called with the state whenever it has been (re)opened, and of `changed`
 * what is named as a list, when that has changed. */
export function connect(refresh, changed) {
  open(refresh, changed);
  // A sleeping laptop may leave a line that is open in name only.
  window.addEventListener("online", () => {
    if (get().link !== "open") open(refresh, changed);
  });
}

async function open(refresh, changed) {
  line?.close();
  const again = () => setTimeout(() => open(refresh, changed), RETRY_MS);
  try {
    const { version, model, settings, defaults, machine, notices = [] } = await api.getState();
    change({ version, model, settings: settingsSaver.over(settings), defaults, machine });
    for (const text of notices.filter((one) => !told.has(one))) toast(text, { forMs: NOTICE_MS });
    notices.forEach((one) => told.add(one));
  } catch (failure) {
    change({ link: failure.status === 401 ? "denied" : "gone" });
    again();
    return;
  }
  line = new EventSource(api.eventsAddress);
  const own = line;
  own.addEventListener("open", () => {
    // Before the line counts as open: a message that waits for it belongs to the conversation that is read now.
    refresh();
    change({ link: "open" });
  });
  own.addEventListener("error", () => {
    // The browser's own retries cannot tell a refusal from a restart, and a restart needs everything read again.
    own.close();
    change({ link: "gone" });
    again();
  });
  own.addEventListener("model", (event) => noteModel(JSON.parse(event.data)));
  own.addEventListener("download", (event) => noteDownload(JSON.parse(event.data)));
  for (const [list, read] of Object.entries(changed)) own.addEventListener(list, read);
}

function noteModel(model) {
  const before = get().model;
  takeModel(model);
  // Each model brings its own defaults.
  if (model.status === "ready" && before?.status !== "ready") readDefaults();
}

async function readDefaults() {
  try {
    const { defaults, machine } = await api.getState();
    change({ defaults, machine });
  } catch (failure) {
    if (!failure.gone) report(failure);
  }
}

/** Takes over what the server tells of a download. */
export function noteDownload(download) {
  const others = get().downloads.filter(({ key }) => key !== download.key);
  change({ downloads: [...others, download].sort((a, b) => String(a.key).localeCompare(String(b.key))) });
}
