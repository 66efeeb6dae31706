"""What the app's tests share: nothing of the device is measured when a model is loaded in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgeinfer.runtime.backends.contract import Backend, KVCache
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.speculation import costs as device_costs


@pytest.fixture(scope="module", autouse=True)
def known_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models are loaded in half the time, and planned for alike: nothing that replies tell of costs is kept."""

    def measured(backend: Backend, cache: KVCache, *, step: int, most: int) -> PassCosts:
        return PassCosts(((1, 1.0), (32, 1.05)), step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_costs, "measure_passes", measured)
        patch.setattr(device_costs, "measure_guesses", lambda drafter, context: 0.1)
        patch.setattr(device_costs, "measure_reading", lambda *_: (0, 0.0))
        patch.setattr(DeviceProfile, "save_costs", lambda profile, costs: None)
        # Not where other tests would find them.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "desktop"))
        yield
