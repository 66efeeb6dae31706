// Says in words what a reply took and how full the context is; knows nothing of elements.

import { count, counted, duration, rate } from "./format.js";

/** What is told below a reply: [text, explanation] each. */
export function figuresOf(message) {
  const figures = message.figures;
  if (!figures) return [];
  const told = [];
  if (figures.tokens_per_second > 0) told.push([rate(figures.tokens_per_second), "Speed after the first token"]);
  told.push([
    `${duration(figures.ttft_ms)} to first token`,
    "From sending to the first token, the prompt's evaluation included",
  ]);
  const cached = figures.cached_tokens ? `, ${count(figures.cached_tokens)} of them kept from before` : "";
  told.push([
    counted(figures.completion_tokens, "token"),
    `After a prompt of ${counted(figures.prompt_tokens, "token")}${cached}`,
  ]);
  if (figures.drafted > 0) {
    told.push([
      `${count(figures.accepted)} of ${count(figures.drafted)} guesses right`,
      "Tokens that were guessed ahead and that the model confirmed; without guessing the text is the same, but slower",
    ]);
  }
  if (figures.left_out > 0) {
    told.push([
      `without the first ${counted(figures.left_out, "message")}`,
      "The context has no room for them, so the model did not read them",
    ]);
  }
  if (figures.approximate) {
    told.push([
      "approximate: the kept files were read apart from each other",
      "Not quite the reply to one text with all of these files in it",
    ]);
  }
  return told;
}

/** Tokens in use at the end of a path, and how many the context holds; null before the first reply. */
export function contextUse(path, model) {
  const last = path.findLast((message) => message.figures);
  if (!last) return null;
  const { prompt_tokens, completion_tokens, context } = last.figures;
  const holds = model?.status === "ready" && model.context ? model.context : context;
  // The last token is counted although it need not be kept.
  return holds ? { used: Math.min(prompt_tokens + completion_tokens, holds), holds } : null;
}

const CONTEXT_CODES = new Set(["context_full", "context_length_exceeded"]);

/** Whether the path ends because the context holds no more. */
export function contextIsFull(path, model) {
  const last = path.at(-1);
  if (!last || last.role !== "assistant" || last.status === "replying") return false;
  if (CONTEXT_CODES.has(last.error?.code)) return true;
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

/** Whether it was the context that allowed no more. */
export function filledContext({ figures }) {
  return figures.prompt_tokens + figures.completion_tokens >= figures.context - 1;
}
