"""What happens when a conversation outgrows the context; knows nothing of text or planning."""
