"""Fixtures of the public face that the command's tests share."""

from __future__ import annotations

from tests.edgeinfer.conftest import bigrams as bigrams
from tests.edgeinfer.conftest import brisk as brisk
from tests.edgeinfer.conftest import cache as cache
from tests.edgeinfer.conftest import loaded as loaded
from tests.edgeinfer.conftest import model as model
from tests.edgeinfer.conftest import short_drafter as short_drafter
from tests.edgeinfer.conftest import small_bundle as small_bundle
from tests.edgeinfer.conftest import told_costs as told_costs
