"""Makes the default model of the command small: what the command refuses and writes does not depend
on its size.
"""

import pytest

from fastaccum.transformer import PRESETS


@pytest.fixture(scope="module", autouse=True)
def small_preset():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "nano", {**PRESETS["nano"], "width": 16, "layers": 1, "heads": 2})
        yield
