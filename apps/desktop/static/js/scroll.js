// Keeps the newest text in sight while it grows, unless the reader went back; knows nothing of messages.

const NEAR_PX = 72;

/**
 * Follows the foot of `box`, whose content is `inner`; `seen` is called when following starts or ends, and nothing moves
 * while `still()` holds.
 */
export function createFollower(box, inner, seen, still) {
  let following = true;
  const distance = () => box.scrollHeight - box.scrollTop - box.clientHeight;
  const set = (now) => {
    if (now !== following) seen(now);
    following = now;
  };
  const toEnd = () => {
    box.scrollTop = box.scrollHeight;
  };
  // Only what a reader does ends following: growing text also makes the distance large.
  box.addEventListener(
    "wheel",
    (event) => {
      if (event.deltaY < 0) set(false);
    },
    { passive: true },
  );
  box.addEventListener("touchmove", () => set(distance() < NEAR_PX), { passive: true });
  box.addEventListener("keydown", (event) => {
    if (["PageUp", "ArrowUp", "Home"].includes(event.key)) set(false);
  });
  box.addEventListener("pointerdown", (event) => {
    if (event.target === box) set(false);
  });
  box.addEventListener(
    "scroll",
    () => {
      if (distance() < 4) set(true);
      else if (distance() > box.clientHeight) set(false);
    },
    { passive: true },
  );
  new ResizeObserver(() => {
    if (following && !still()) toEnd();
  }).observe(inner);
  new ResizeObserver(() => {
    if (following && !still()) toEnd();
  }).observe(box);
  return {
    toEnd() {
      set(true);
      toEnd();
    },
  };
}
