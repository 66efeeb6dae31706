// Sends changes to the server one after another, so that none overtakes or undoes another; knows no elements.

import * as api from "./api.js";
import { change, get } from "./store.js";
import { report } from "./toast.js";

const RETRY_MS = 1000;

const savers = new Set();

/** Fields with changes made to them; options are changed one by one. */
export function merged(first, then) {
  const both = { ...first, ...then };
  return then.options ? { ...both, options: { ...first.options, ...then.options } } : both;
}

/** What saves changes: `send(fields, leaving)` answers with all fields as they are then, which `take` is given. */
export function createSaver(send, take) {
  const unsaved = [];
  let last = Promise.resolve();
  /** What was read, with the changes that the server may not have had yet. */
  const over = (read) => unsaved.reduce(merged, read);

  async function next(fields) {
    for (;;) {
      try {
        const answer = await send(fields, false);
        unsaved.shift();
        take(over(answer));
        return true;
      } catch (failure) {
        // A server that is started again shall have what was changed meanwhile.
        if (failure.gone) {
          await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
          continue;
        }
        unsaved.shift();
        report(failure);
        return false;
      }
    }
  }

  /** Saves some fields; false where that was refused. */
  function save(fields) {
    unsaved.push(fields);
    last = last.then(() => next(fields));
    return last;
  }

  savers.add(() => unsaved.length && send(unsaved.reduce(merged, {}), true).catch(() => {}));
  return { over, save };
}

window.addEventListener("pagehide", () => {
  for (const leave of savers) leave();
});

/** Changes of the user's settings. */
export const settingsSaver = createSaver(api.patchSettings, (settings) => change({ settings }));

/** Shows and saves some settings. */
export async function saveSettings(fields) {
  change({ settings: merged(get().settings, fields) });
  if (await settingsSaver.save(fields)) return;
  const read = await api.getState().catch(report);
  if (read) change({ settings: settingsSaver.over(read.settings) });
}
