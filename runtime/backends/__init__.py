"""Engines that run a model behind one contract."""
