// The MCP servers in the panel: whether they are connected, their tools, and what is allowed of each.

import * as api from "./api.js";
import { h } from "./dom.js";
import { report } from "./toast.js";

const AGAIN_MS = 1000;
const PERMISSIONS = { ask: "Ask", always: "Always", never: "Never" };

/** Makes the section; `refresh` reads it again. */
export function createTools() {
  const list = h("div", { class: "tool-servers" });
  const reload = h("button", { type: "button", class: "button small", onclick: () => show(list, api.reloadTools()) }, "Connect again");
  const element = h("section", { class: "tools", "aria-label": "Tools" }, h("h3", {}, "Tools"), list, reload);
  return { element, refresh: () => show(list, api.getTools()) };
}

async function show(list, asked) {
  try {
    const { path, error, servers } = await asked;
    list.replaceChildren(
      h("p", { class: "note" }, servers.length ? `From ${path}.` : `Servers of tools (MCP) are named in ${path}.`),
      ...(error ? [h("p", { class: "note error" }, error)] : []),
      ...servers.map((server) => section(list, server)),
    );
    const starting = servers.some(({ status }) => status === "starting");
    if (starting) setTimeout(() => show(list, api.getTools()), AGAIN_MS);
  } catch (failure) {
    report(failure);
  }
}

function section(list, { name, status, message, tools }) {
  return h(
    "details",
    { class: `tool-server ${status}`, open: status !== "disabled" },
    h("summary", {}, h("span", { class: "name" }, name), h("span", { class: "facts" }, status === "ready" ? `${tools.length} tools` : status)),
    message && h("p", { class: "note error" }, message),
    tools.map((tool) => row(list, name, tool)),
  );
}

function row(list, server, { title, description, permission }) {
  const choice = h(
    "select",
    {
      class: "select compact",
      "aria-label": `What ${title} may do`,
      onchange: () => show(list, api.allowTool(server, title, choice.value)),
    },
    Object.entries(PERMISSIONS).map(([value, text]) => h("option", { value }, text)),
  );
  choice.value = permission;
  return h("div", { class: "tool" }, h("div", { class: "text", title: description }, h("code", {}, title), h("small", {}, description)), choice);
}
