"""The OpenAI-compatible server: HTTP on one side, a model host on the other; knows the public face only."""
