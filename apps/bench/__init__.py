"""Benchmarks for users: one file for each subject of `edgeinfer bench`."""
