"""Programs built on the public face; they know nothing of what lies below it."""
