"""The native low-bit kernel: C, built into one shared library, and what finds, checks and measures it."""
