"""Ways of decoding that look at several continuations in one cache, or weigh one in other ways than the model."""
