"""Comparisons of ways to quantize that no bundle can hold, and the recipe of a model that figures were made with."""
