// The options of generation that the panel offers: names, ranges, what holds where nothing is said; knows no elements.

export const OPTIONS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.05,
    usual: 0,
    help: "0 always takes the likeliest token; more is more varied.",
  },
  {
    name: "top_p",
    label: "Top-p",
    min: 0.01,
    max: 1,
    step: 0.01,
    usual: 1,
    help: "Keeps the likeliest tokens that together have this probability.",
  },
  {
    name: "top_k",
    label: "Top-k",
    min: 0,
    max: 200,
    step: 1,
    usual: 0,
    help: "Keeps so many of the likeliest tokens; 0 keeps all.",
  },
  {
    name: "min_p",
    label: "Min-p",
    min: 0,
    max: 0.5,
    step: 0.01,
    usual: 0,
    help: "Drops tokens less likely than this share of the likeliest.",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 1,
    max: 2,
    step: 0.01,
    usual: 1,
    help: "Above 1, tokens already in the text become less likely.",
  },
  {
    name: "seed",
    label: "Seed",
    min: 0,
    step: 1,
    empty: "random",
    help: "The same seed and prompt give the same reply.",
  },
  {
    name: "max_tokens",
    label: "Longest reply",
    min: 1,
    step: 1,
    empty: "context",
    help: "In tokens; empty goes on until the context is full.",
  },
  {
    name: "speculation",
    label: "Drafting",
    choices: [
      ["auto", "Where it pays"],
      ["off", "Off"],
    ],
    usual: "auto",
    help: "Faster replies with the same text.",
  },
];

/** Changes that take every option back to the model's own. */
export const RESET = Object.fromEntries(OPTIONS.map(({ name }) => [name, null]));
