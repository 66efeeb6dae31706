"""Draft modules put into a target's bundle at export: published EAGLE heads, and what models ship with themselves."""
