"""Rules by which drafts are accepted."""
