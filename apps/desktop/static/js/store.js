// Holds what the page knows and tells who wants to hear of a change; knows neither the server nor the page.

const state = {
  link: "connecting", // connecting | open | gone | denied
  version: "",
  model: null, // as GET /state and the event `model` describe it
  settings: null,
  defaults: { options: {} },
  machine: null,
  downloads: [],
  catalog: null, // models that can be had, and what this machine has room for; null until it is known
  conversations: null, // those listed; null until they are known
  kept: null, // files that are kept for later; null until they are known
  search: "",
  removed: new Set(), // deleted, but can still be brought back
  conversation: null, // the one shown; null is a new chat
  opening: false,
};

const listeners = new Map();

/** The present state; change it by `change` only. */
export function get() {
  return state;
}

/** Sets some of the state and calls those who follow any of it. */
export function change(part) {
  Object.assign(state, part);
  const called = new Set();
  for (const name of Object.keys(part)) {
    for (const listener of listeners.get(name) ?? []) called.add(listener);
  }
  for (const listener of called) listener(state);
}

/** Takes over a state of the model unless a newer one is known: an answer may arrive behind the event that follows it. */
export function takeModel(model) {
  if (model.number >= (state.model?.number ?? 0)) change({ model });
}

/** Calls `listener` after a change of any of `names`, and once now. */
export function follow(names, listener) {
  for (const name of names) listeners.set(name, [...(listeners.get(name) ?? []), listener]);
  listener(state);
}
