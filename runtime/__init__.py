"""Running a bundle: backends, cache, plan, sampling, text; knows nothing of checkpoints or how a bundle was made."""
