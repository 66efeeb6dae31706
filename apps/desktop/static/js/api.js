// Calls the app's HTTP API; knows nothing of the page.

const BASE = "app/api";
// Browsers send no more than 64 KiB for pages that go away.
const MOST_KEPT_ALIVE = 60_000;

/** A call that was refused or got no answer. */
export class ApiError extends Error {
  constructor(message, { hint = "", code = "", status = 0 } = {}) {
    super(message);
    Object.assign(this, { hint, code, status });
  }

  /** Nobody answered: the server is not there. */
  get gone() {
    return this.status === 0;
  }
}

async function call(method, path, { body, signal, keepalive } = {}) {
  const file = body instanceof Blob;
  const headers = body === undefined ? {} : { "content-type": file ? "application/octet-stream" : "application/json" };
  const text = body === undefined || file || typeof body === "string" ? body : JSON.stringify(body);
  const alive = keepalive && new Blob([text ?? ""]).size < MOST_KEPT_ALIVE;
  let answer;
  try {
    answer = await fetch(`${BASE}${path}`, { method, headers, body: text, signal, keepalive: alive, cache: "no-store" });
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new ApiError("The app's server does not answer.", {
      hint: "Start edgeinfer again.",
      code: "gone",
    });
  }
  const found = answer.status === 204 ? null : await read(answer);
  if (answer.ok) return found;
  const { message, hint, code } = found?.error ?? {};
  throw new ApiError(message ?? `The server answered ${answer.status}.`, {
    hint: hint ?? "",
    code: code ?? "",
    status: answer.status,
  });
}

async function read(answer) {
  try {
    return await answer.json();
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    // Not every refusal comes from the app itself; its status says enough.
    if (!answer.ok) return null;
    throw new ApiError("The server's answer could not be read.", { code: "unreadable", status: answer.status });
  }
}

const chat = (id) => `/conversations/${encodeURIComponent(id)}`;
const message = (id, which) => `${chat(id)}/messages/${encodeURIComponent(which)}`;

export const getState = () => call("GET", "/state");
/** `leaving`: the page goes away, and the answer with it. */
export const patchSettings = (settings, leaving = false) =>
  call("PATCH", "/settings", { body: settings, keepalive: leaving });
export const getModels = () => call("GET", "/models");
export const plan = (wanted, signal) => call("POST", "/plan", { body: wanted, signal });
export const loadModel = (wanted) => call("POST", "/model/load", { body: wanted });
export const cancelLoad = () => call("POST", "/model/cancel");
export const unloadModel = () => call("POST", "/model/unload");
export const getCatalog = () => call("GET", "/catalog");
export const searchHub = (text) => call("GET", `/hub?search=${encodeURIComponent(text)}`);
export const getOffers = (name) => call("GET", `/offers?name=${encodeURIComponent(name)}`);
export const getFolder = (path) => call("GET", `/folders?path=${encodeURIComponent(path)}`);
export const importModel = (path) => call("POST", "/models/import", { body: { path } });
export const removeModel = (id) => call("POST", "/models/remove", { body: { id } });
export const startDownload = (id) => call("POST", "/downloads", { body: { id } });
export const cancelDownload = (key) => call("DELETE", `/downloads/${encodeURIComponent(key)}`);
export const listConversations = (search, signal) =>
  call("GET", `/conversations?search=${encodeURIComponent(search)}`, { signal });
export const createConversation = (fields) => call("POST", "/conversations", { body: fields });
export const getConversation = (id) => call("GET", chat(id));
export const patchConversation = (id, fields, leaving = false) =>
  call("PATCH", chat(id), { body: fields, keepalive: leaving });
export const deleteConversation = (id, leaving = false) => call("DELETE", chat(id), { keepalive: leaving });
export const sendMessage = (id, parent, content, attachments) =>
  call("POST", `${chat(id)}/messages`, { body: { parent, content, attachments } });
export const attach = (file, signal) =>
  call("POST", `/attachments?name=${encodeURIComponent(file.name)}`, { body: file, signal });
export const getAttachment = (id) => call("GET", `/attachments/${encodeURIComponent(id)}`);
export const discardAttachment = (id) => call("DELETE", `/attachments/${encodeURIComponent(id)}`);
/** Has the model read a file now; it is kept once that is done. */
export const keepAttachment = (id, conversation, signal) =>
  call("POST", `/attachments/${encodeURIComponent(id)}/keep`, { body: { conversation }, signal });
export const listKept = () => call("GET", "/kept");
export const removeKept = (id) => call("DELETE", `/kept/${encodeURIComponent(id)}`);
export const countTokens = (draft, signal) => call("POST", "/tokens", { body: draft, signal });
export const regenerate = (id, which) => call("POST", `${message(id, which)}/regenerate`);
export const editMessage = (id, which, content) => call("POST", `${message(id, which)}/edit`, { body: { content } });
export const continueMessage = (id, which) => call("POST", `${message(id, which)}/continue`);
/** Answers a call of a tool that waits: once, always, no or never. */
export const allowCall = (id, which, allow) =>
  call("POST", `${chat(id)}/calls/${encodeURIComponent(which)}`, { body: { allow } });
export const getTools = () => call("GET", "/tools");
export const reloadTools = () => call("POST", "/tools/reload");
export const allowTool = (server, tool, permission) =>
  call("POST", "/tools/allow", { body: { server, tool, permission } });
export const stopReply = (id) => call("POST", `${chat(id)}/stop`);
export const answerNow = (id) => call("POST", `${chat(id)}/answer`);
export const importConversation = (text) => call("POST", "/import", { body: text });
export const exportAddress = (id, format) => `${BASE}${chat(id)}/export?format=${format}`;
export const replyAddress = (id) => `${BASE}${chat(id)}/reply`;
export const eventsAddress = `${BASE}/events`;
