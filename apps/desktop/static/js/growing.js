// Loads the model that is there with a larger context; knows nothing of why.

import * as api from "./api.js";
import { count, size } from "./format.js";
import { openModels } from "./models.js";
import { change, get, takeModel } from "./store.js";
import { report, toast } from "./toast.js";

/** Loads it, for a conversation where one is named; false where that many tokens do not fit. */
export async function loadContext(context, conversation = null) {
  const { id, choice } = get().model;
  const wanted = { model: id, memory: choice?.memory ?? null, context };
  try {
    const plan = await api.plan(wanted);
    if (!plan.fits) {
      toast(`${count(context)} tokens of context need ${size(plan.minimum_bytes)}, which is more than the budget.`);
      openModels(id, { context });
      return false;
    }
    const loading = await api.loadModel({ ...wanted, conversation, default: false });
    const shown = get().conversation;
    if (conversation && shown?.id === conversation)
      change({ conversation: { ...shown, choice: loading.choice ?? null } });
    takeModel(loading);
    return true;
  } catch (failure) {
    report(failure);
    return false;
  }
}
