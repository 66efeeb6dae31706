// Light, dark or as the system has it; kept by the server, and by the browser for the first paint.

import { h, icon } from "./dom.js";
import { saveSettings } from "./saving.js";
import { follow } from "./store.js";

const THEMES = [
  ["system", "screen", "Theme of the system"],
  ["light", "sun", "Light theme"],
  ["dark", "moon", "Dark theme"],
];

/** The switch between themes. */
export function createThemeSwitch() {
  const buttons = THEMES.map(([name, drawing, label]) =>
    h(
      "button",
      { type: "button", "aria-label": label, title: label, "data-theme-choice": name, onclick: () => saveSettings({ theme: name }) },
      icon(drawing),
    ),
  );
  follow(["settings"], ({ settings }) => {
    if (!settings) return;
    const now = settings.theme ?? "system";
    apply(now);
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.themeChoice === now));
  });
  return h("div", { class: "segments", role: "group", "aria-label": "Theme" }, buttons);
}

function apply(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}
