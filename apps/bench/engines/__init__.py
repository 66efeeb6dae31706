"""Engines that the benchmarks time; each runs under an interpreter that has that engine, see worker.py."""
