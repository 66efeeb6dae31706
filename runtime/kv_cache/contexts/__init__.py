"""Texts whose rows are made once, kept in files, and put before any prompt."""
