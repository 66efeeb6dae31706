// Sets the remembered theme before anything is painted; knows nothing of the server, whose setting may correct it later.
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; the system's theme holds until the server's setting arrives.
}
