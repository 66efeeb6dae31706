// What can be done with conversations, and which one is shown; knows nothing of elements.

import * as api from "./api.js";
import { announce } from "./dom.js";
import { followReply, unfollow } from "./reply.js";
import { createSaver } from "./saving.js";
import { change, get } from "./store.js";
import { report, toast } from "./toast.js";
import { find, newestLeaf } from "./tree.js";

const UNDO_MS = 6000;

let listing = null;
let changes = 0;
const savers = new Map();

/** Reads the list again, as searched. */
export async function refreshList() {
  listing?.abort();
  listing = new AbortController();
  try {
    const { conversations } = await api.listConversations(get().search, listing.signal);
    change({ conversations });
    const shown = get().conversation;
    const title = conversations.find(({ id }) => id === shown?.id)?.title;
    if (title && title !== shown.title) change({ conversation: { ...shown, title } });
  } catch (failure) {
    if (failure.name !== "AbortError" && !failure.gone) report(failure);
  }
}

/** Shows a conversation, or a new chat for null; the address follows. */
export function show(id) {
  const wanted = id ? `#/chat/${id}` : "#/";
  if (location.hash === wanted) return open(id);
  location.hash = wanted;
  return undefined;
}

/** The id of the conversation that the address names; null for a new chat. */
export function addressed() {
  const named = /^#\/chat\/(.+)$/.exec(location.hash);
  return named ? decodeURIComponent(named[1]) : null;
}

/** Shows what the address names. */
export const followAddress = () => open(addressed());

async function open(id) {
  if (id === null) {
    unfollow();
    change({ conversation: null, opening: false });
    return;
  }
  if (get().conversation?.id !== id) {
    unfollow();
    change({ conversation: null, opening: true });
  }
  const before = changes;
  try {
    const conversation = await api.getConversation(id);
    // While it was read another may have been asked for.
    if (location.hash !== `#/chat/${id}`) return;
    // What was read may be older than a reply that has started meanwhile, or than a change.
    if (before !== changes) {
      open(id);
      return;
    }
    change({ conversation: saverOf(id).over(conversation), opening: false });
    if (conversation.replying) watch(conversation.id);
  } catch (failure) {
    if (failure.status === 404) show(null);
    else change({ opening: false });
    if (!failure.gone) report(failure);
  }
}

/** Reads the shown conversation again. */
export function refreshShown() {
  const shown = get().conversation;
  return shown ? open(shown.id) : followAddress();
}

/** Puts messages into the shown conversation, replacing those with the same id; the last one becomes the leaf. */
function put(id, messages, fields = {}) {
  const shown = get().conversation;
  if (shown?.id !== id) return;
  const fresh = new Map(messages.map((message) => [message.id, message]));
  const kept = shown.messages.map((message) => {
    const newer = fresh.get(message.id);
    fresh.delete(message.id);
    return newer ?? message;
  });
  change({ conversation: { ...shown, messages: [...kept, ...fresh.values()], ...fields } });
}

function watch(id) {
  followReply(id, {
    text({ id: which, html, content, live, calls }) {
      const shown = get().conversation;
      const message = shown?.id === id && find(shown, which);
      if (message) put(id, [{ ...message, html, content, live, calls, status: "replying" }]);
    },
    end(message) {
      const shown = get().conversation;
      if (!message?.id || shown?.id !== id) return;
      put(id, [message], { replying: null });
      announce(message.status === "error" ? "The reply failed." : `Reply: ${message.content}`);
    },
    lost() {
      // With the server gone the line to it brings everything back; otherwise only this stream broke.
      if (get().link === "open") setTimeout(refreshShown, 500);
    },
  });
}

/** Answers a call of a tool in the shown conversation, which waits for it. */
export async function allow(which, answer) {
  try {
    await api.allowCall(get().conversation.id, which, answer);
  } catch (failure) {
    report(failure);
  }
}

async function begin(id, call) {
  try {
    const { user, assistant } = await call();
    changes += 1;
    const replying = assistant.status === "replying" ? assistant.id : null;
    // What is loaded is what the conversation uses from now on.
    const choice = get().model?.choice ?? get().conversation?.choice ?? null;
    put(id, [user, assistant].filter(Boolean), { leaf: assistant.id, replying, choice });
    if (replying) watch(id);
    return true;
  } catch (failure) {
    report(failure);
    return false;
  }
}

/** Sends a message to the shown conversation, or to a new one; false where it was not taken. */
export async function send(content, attachments = []) {
  let { conversation } = get();
  if (!conversation) {
    try {
      conversation = await api.createConversation({});
    } catch (failure) {
      report(failure);
      return false;
    }
    change({ conversation });
    history.pushState(null, "", `#/chat/${conversation.id}`);
  }
  const { id, leaf } = conversation;
  return begin(id, () => api.sendMessage(id, leaf, content, attachments));
}

const shownId = () => get().conversation.id;

export const regenerate = (which) => begin(shownId(), () => api.regenerate(shownId(), which));
export const edit = (which, content) => begin(shownId(), () => api.editMessage(shownId(), which, content));
export const goOn = (which) => begin(shownId(), () => api.continueMessage(shownId(), which));

/** Stops the running reply of the shown conversation; what there is of it is kept. */
export async function stop() {
  const shown = get().conversation;
  if (shown?.replying) await api.stopReply(shown.id).catch(report);
}

/** Has the model end its thought. */
export async function answerNow() {
  const shown = get().conversation;
  if (shown?.replying) await api.answerNow(shown.id).catch(report);
}

/** Shows another version of a message and what followed it. */
export async function switchTo(message) {
  const shown = get().conversation;
  const { id: leaf } = newestLeaf(shown, message);
  change({ conversation: { ...shown, leaf } });
  await api.patchConversation(shown.id, { leaf }).catch(report);
}

/** Lets a conversation use what is loaded. */
export const adopt = (id, { model, memory, context }) => update(id, { choice: { model, memory, context } });

/** Changes title, system prompt, options or model of a conversation; false where that was refused. */
export async function update(id, fields) {
  if (await saverOf(id).save(fields)) return true;
  // What was shown in advance does not hold.
  refreshShown();
  return false;
}

function saverOf(id) {
  if (!savers.has(id)) {
    const send = (fields, leaving) => api.patchConversation(id, fields, leaving);
    const saver = createSaver(send, (changed) => take(id, changed));
    savers.set(id, saver);
  }
  return savers.get(id);
}

function take(id, { title, system, options, choice }) {
  changes += 1;
  const shown = get().conversation;
  if (shown?.id === id) change({ conversation: { ...shown, title, system, options, choice } });
  const listed = get().conversations?.map((entry) => (entry.id === id ? { ...entry, title } : entry));
  change({ conversations: listed ?? null });
}

/** Takes a conversation off the list; for some seconds it can be brought back, then it is deleted. */
export function remove(id, title) {
  change({ removed: new Set([...get().removed, id]) });
  if (get().conversation?.id === id) show(null);
  const restore = () => change({ removed: new Set([...get().removed].filter((other) => other !== id)) });
  const erase = (leaving) =>
    api.deleteConversation(id, leaving).catch((failure) => {
      restore();
      report(failure);
    });
  const leave = () => {
    if (get().removed.has(id)) erase(true);
  };
  window.addEventListener("pagehide", leave, { once: true });
  toast(`“${title}” deleted`, {
    action: "Undo",
    forMs: UNDO_MS,
    onaction() {
      window.removeEventListener("pagehide", leave);
      restore();
      show(id);
    },
    onend() {
      window.removeEventListener("pagehide", leave);
      erase(false);
    },
  });
}

/** Takes in a conversation from a file that was exported as JSON. */
export async function importFile(file) {
  try {
    const { id } = await api.importConversation(await file.text());
    await refreshList();
    show(id);
  } catch (failure) {
    report(failure);
  }
}
