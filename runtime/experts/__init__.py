"""Experts at run time: which of them a pass may use, how they were used, which are in memory, what they cost."""
