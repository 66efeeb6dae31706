"""Replies that a model on another machine decides and this one drafts."""
