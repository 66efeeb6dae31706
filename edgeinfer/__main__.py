"""`python -m edgeinfer` is the command `edgeinfer`: a program above this package, so it is run by its name."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("edgeinfer.apps.cli.main", run_name="__main__", alter_sys=True)
