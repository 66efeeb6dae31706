"""Settings that run a model faster on this device than the usual ones: found, proved, kept, and found again."""
