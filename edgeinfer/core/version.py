"""Which version of edgeinfer this is, and of how it samples."""

from __future__ import annotations

VERSION = "0.1.0"
# Of how a seed makes text: 1 drew by one number of a position and the cumulative distribution, 2 draws by Gumbel noise.
SAMPLING = 2
