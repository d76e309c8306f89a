"""A fixture for pytest, for those who ask for it: `pytest_plugins = ["tare_notebook.pytest_plugin"]` in conftest.py, or `-p tare_notebook.pytest_plugin`.

`tare_zero`: a test that uses it fails where tensors made in it are still held when it ends.
"""

from __future__ import annotations

from typing import Iterator

import pytest

from ._zero import Baseline, StillHeld, assert_zero


@pytest.fixture
def tare_zero() -> Iterator[Baseline]:
    """The baseline at the start of the test; at its end nothing that came after it may be held."""
    baseline = Baseline()
    yield baseline
    try:
        assert_zero(baseline)
    except StillHeld as error:
        pytest.fail(str(error), pytrace=False)
