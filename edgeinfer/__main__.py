"""`python -m edgeinfer` is the command `edgeinfer`; knows nothing more."""

from __future__ import annotations

import sys

from edgeinfer.apps.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
