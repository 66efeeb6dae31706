// Writes numbers, sizes and days as people read them; knows nothing of where they come from.

const UNITS = [
  ["GB", 1e9],
  ["MB", 1e6],
  ["KB", 1e3],
];

/** Bytes in decimal units: 412 MB, 1.3 GB. */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  for (const [unit, factor] of UNITS) {
    if (bytes >= factor) return `${trim(bytes / factor)} ${unit}`;
  }
  return `${bytes} B`;
}

/** Bytes in MB whatever their size, so that the parts of a plan can be compared. */
export function megabytes(bytes) {
  const value = bytes / 1e6;
  return `${value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")} MB`;
}

/** Bytes of a size somebody typed, such as `600`, `600 MB` or `1.5GiB` (a bare number is MB), or null. */
export function parseSize(text) {
  const match = /^\s*(\d+(?:[.,]\d+)?)\s*([kmgt]?)(i?)b?\s*$/i.exec(text);
  if (!match) return null;
  const power = match[2] ? "kmgt".indexOf(match[2].toLowerCase()) + 1 : 2;
  const bytes = Math.round(parseFloat(match[1].replace(",", ".")) * (match[3] ? 1024 : 1000) ** power);
  return bytes > 0 ? bytes : null;
}

/** A number of parameters: 5.3M, 494M, 7.2B. */
export function parameters(count) {
  if (!count) return "";
  const [unit, factor] = count >= 1e9 ? ["B", 1e9] : count >= 1e6 ? ["M", 1e6] : ["K", 1e3];
  return `${trim(count / factor)}${unit}`;
}

/** A whole number with separators of thousands. */
export function count(value) {
  return Math.round(value).toLocaleString("en");
}

/** `1 token`, `2 tokens`. */
export function counted(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** A duration: 0.8 ms, 212 ms, 1.4 s. */
export function duration(milliseconds) {
  if (milliseconds >= 1000) return `${trim(milliseconds / 1000)} s`;
  return `${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`;
}

/** Tokens per second. */
export function rate(value) {
  return `${value < 100 ? value.toFixed(1) : count(value)} tokens/s`;
}

/** Bits per weight: 8.4-bit. */
export function bits(value) {
  return value ? `${trim(value)}-bit` : "";
}

function trim(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1).replace(/\.0$/, "");
}

/** The heading under which something of that time is listed. */
export function day(time, now = new Date()) {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate());
  const days = Math.ceil((midnight - time) / 86400000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Previous 7 days";
  if (days <= 30) return "Previous 30 days";
  return time.toLocaleDateString(
    "en",
    time.getFullYear() === now.getFullYear() ? { month: "long" } : { month: "long", year: "numeric" },
  );
}

/** A date of the API: seconds since 1970 or ISO text. */
export function date(value) {
  return new Date(typeof value === "number" ? value * 1000 : value);
}
