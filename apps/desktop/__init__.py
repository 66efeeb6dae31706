"""The desktop chat app: a window over a local server, with its history; knows the public face only."""
