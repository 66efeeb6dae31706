"""The machine and this process: memory, cores, allocation failures, the user's folders."""
