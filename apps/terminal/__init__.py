"""A chat in the terminal; knows the public face only."""
