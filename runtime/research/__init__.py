"""Methods without a measured gain, found by entry points and loaded only when an option names them."""
