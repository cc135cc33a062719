"""What tests of kernels share: each leaves the compiled kernels at their best instruction set."""

import pytest


@pytest.fixture(autouse=True)
def best_level():
    yield
    try:
        from moepack.runtime.kernels import affine_native
    except (ImportError, OSError):  # not compiled
        return
    affine_native.use_level()
