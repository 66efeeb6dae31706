// The options of generation that the panel offers: names, ranges, what holds where nothing is said; knows no elements.

export const OPTIONS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.05,
    usual: 0,
    help: "At 0 replies are always the same; higher values are more varied.",
  },
  {
    name: "top_p",
    label: "Top-p",
    min: 0.01,
    max: 1,
    step: 0.01,
    usual: 1,
    help: "Chooses among the likeliest tokens whose probabilities add up to this.",
  },
  {
    name: "top_k",
    label: "Top-k",
    min: 0,
    max: 200,
    step: 1,
    usual: 0,
    help: "Chooses among only this many of the likeliest tokens; 0 means all.",
  },
  {
    name: "min_p",
    label: "Min-p",
    min: 0,
    max: 0.5,
    step: 0.01,
    usual: 0,
    help: "Leaves out tokens that are less likely than this share of the likeliest one's probability.",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 1,
    max: 2,
    step: 0.01,
    usual: 1,
    help: "Above 1, words that are already in the text become less likely.",
  },
  {
    name: "seed",
    label: "Seed",
    min: 0,
    step: 1,
    empty: "random",
    help: "The same seed and message give the same reply.",
  },
  {
    name: "max_tokens",
    label: "Longest reply",
    min: 1,
    step: 1,
    empty: "no limit",
    help: "In tokens. Without a limit, a reply may continue until the context is full.",
  },
  {
    name: "speculation",
    label: "Speculative decoding",
    choices: [
      ["auto", "When faster"],
      ["off", "Off"],
    ],
    usual: "auto",
    help: "Drafts several tokens and checks them all in one pass: faster, and the text stays the same.",
  },
  {
    name: "when_full",
    label: "Full context",
    choices: [
      ["stop", "Stop and ask"],
      ["leave_out_oldest", "Leave out oldest"],
    ],
    usual: "stop",
    help: "When a chat outgrows the context. Messages that are left out stay here, but are no longer read.",
  },
  {
    name: "tools",
    label: "Tools",
    choices: [
      ["on", "Offered"],
      ["off", "Not offered"],
    ],
    usual: "on",
    help: "Whether the model may ask to call the tools below. They take room in the context.",
  },
];

/** Changes that take every option back to the model's own. */
export const RESET = Object.fromEntries(OPTIONS.map(({ name }) => [name, null]));
