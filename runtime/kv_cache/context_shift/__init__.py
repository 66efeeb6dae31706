"""Policies for conversations that outgrow the context."""
