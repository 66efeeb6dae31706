// Branches of a conversation: messages form a tree by `parent`, and the shown path ends in `leaf`; pure functions.

/** The message of that id. */
export function find(conversation, id) {
  return conversation.messages.find((message) => message.id === id) ?? null;
}

/** Messages from the first to the leaf. */
export function path(conversation) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const found = [];
  for (let message = byId.get(conversation.leaf); message; message = byId.get(message.parent)) found.unshift(message);
  return found;
}

/** Versions of a message in the order they were made, itself among them. */
export function siblings(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent && other.role === message.role);
}

/** Where the path ends that goes through a message and then always takes the newest. */
export function newestLeaf(conversation, message) {
  for (;;) {
    const children = conversation.messages.filter((other) => other.parent === message.id);
    if (!children.length) return message;
    message = children[children.length - 1];
  }
}
