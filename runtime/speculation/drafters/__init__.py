"""Drafters, one file each; which there are is said in `edgeinfer.runtime.speculation.registry`."""
