"""Devices that models run on: which there are, what they can do, whether they work."""
