// Puts the drawings of icons.svg into the page; knows nothing of where they are shown.

/** Fetched once: icons that came from the file each time would be missing once the server is gone. */
export async function loadIcons() {
  const answer = await fetch("icons.svg");
  if (!answer.ok) return;
  const sprite = new DOMParser().parseFromString(await answer.text(), "image/svg+xml").documentElement;
  sprite.setAttribute("hidden", "");
  sprite.setAttribute("aria-hidden", "true");
  document.body.append(document.adoptNode(sprite));
}
