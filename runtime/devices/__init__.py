"""Devices that models run on: a registry, their abilities, and a check that they work."""
