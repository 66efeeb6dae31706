"""What happens when a conversation outgrows the context."""
