// Follows the running reply of one conversation; knows nothing of how it is shown.

import { replyAddress } from "./api.js";

let source = null;

/** Stops following; the reply itself goes on. */
export function unfollow() {
  source?.close();
  source = null;
}

/**
 * Follows the reply of a conversation from its beginning.
 * `text` is called with the whole message so far, `end` with the finished one, `lost` where the line broke.
 */
export function followReply(conversation, { text, end, lost }) {
  unfollow();
  const own = new EventSource(replyAddress(conversation));
  source = own;
  const finish = (then) => (event) => {
    own.close();
    if (source === own) source = null;
    then(event.data ? JSON.parse(event.data) : null);
  };
  own.addEventListener("text", (event) => text(JSON.parse(event.data)));
  own.addEventListener("done", finish(end));
  own.addEventListener("failed", finish(end));
  own.addEventListener("error", finish(lost));
}
