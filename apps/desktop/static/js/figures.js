// Says in words what a reply took and how full the context is; knows nothing of elements.

import { count, counted, duration, rate } from "./format.js";

// Room for a reply where nothing is said of its length.
const REPLY = 512;
const SMALLEST = 2048;

/** What is shown below a reply that is being made. */
export function liveFiguresOf({ live }) {
  if (!live?.completion_tokens) return [];
  const speed = [rate(live.tokens_per_second), "Speed after the first token"];
  return [live.tokens_per_second > 0 && speed, [counted(live.completion_tokens, "token"), "So far"]].filter(Boolean);
}

/** What is shown below a reply: [text, explanation] each. */
export function figuresOf(message) {
  const figures = message.figures;
  if (!figures) return [];
  const shown = [];
  if (figures.tokens_per_second > 0) shown.push([rate(figures.tokens_per_second), "Speed after the first token"]);
  shown.push([
    `${duration(figures.ttft_ms)} to first token`,
    "From sending to the first token, the prompt's evaluation included",
  ]);
  const cached = figures.cached_tokens ? `, ${count(figures.cached_tokens)} of them kept from before` : "";
  shown.push([
    counted(figures.completion_tokens, "token"),
    `After a prompt of ${counted(figures.prompt_tokens, "token")}${cached}`,
  ]);
  if (figures.drafted > 0) {
    shown.push([
      `${count(figures.accepted)} of ${count(figures.drafted)} drafted tokens accepted`,
      "Speculative decoding: tokens are drafted ahead, and the model checks several at once. The text is the same.",
    ]);
  }
  if (figures.left_out > 0) {
    shown.push([
      `without the first ${counted(figures.left_out, "message")}`,
      "The context has no room for them, so the model did not read them",
    ]);
  }
  if (figures.approximate) {
    shown.push([
      "approximate: the kept files were read apart from each other",
      "Not quite the reply to one text with all of these files in it",
    ]);
  }
  return shown;
}

/** Tokens in use at the end of a path, and how many the context holds; null before the first reply. */
export function contextUse(path, model) {
  const last = path.findLast((message) => message.figures ?? message.live?.prompt_tokens);
  if (!last) return null;
  const { prompt_tokens, completion_tokens, context } = last.figures ?? last.live;
  const holds = model?.status === "ready" && model.context ? model.context : context;
  // The last token is counted although it need not be kept.
  return holds ? { used: Math.min(prompt_tokens + completion_tokens, holds), holds } : null;
}

const CONTEXT_CODES = new Set(["context_full", "context_length_exceeded"]);

/** Whether the path ends with a message that the context does not hold, as far as is known. */
export function isTooLong(path, model) {
  const last = path.at(-1);
  if (last?.role !== "assistant" || !CONTEXT_CODES.has(last.error?.code)) return false;
  return !last.error.tokens || last.error.tokens >= model.context;
}

/** Whether the path ends because the context holds no more. */
export function contextIsFull(path, model) {
  const last = path.at(-1);
  if (!last || last.role !== "assistant" || last.status === "replying") return false;
  const use = contextUse(path, model);
  return cutShort(last) && use !== null && use.used >= use.holds - 1;
}

/** Whether a reply ended because it was allowed no more tokens. */
export function cutShort({ status, figures }) {
  return status === "complete" && figures?.finish_reason === "length";
}

/** The context to go on with where this one is full: twice as much, or what the model holds at most; null if it is that. */
export function largerContext(model) {
  const { context, most_context: most } = model;
  return most > context ? Math.min(2 * context, most) : null;
}

/** The smallest context that holds so many tokens and a reply; null where the model holds no more than it has now. */
export function fittingContext(tokens, { context, most_context: most }, reply) {
  const wanted = tokens + (reply ?? REPLY);
  let fitting = SMALLEST;
  while (fitting < wanted) fitting *= 2;
  if (most) fitting = Math.min(fitting, most);
  return fitting > context && fitting > tokens ? fitting : null;
}

/** Whether it was the context that allowed no more. */
export function filledContext({ figures }) {
  return figures.prompt_tokens + figures.completion_tokens >= figures.context - 1;
}
