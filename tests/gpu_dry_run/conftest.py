"""Makes the fixture ``gpu_dry_run`` and its mark known to the tests in this folder."""

import pytest

from .dry_run import gpu_dry_run

__all__ = ['gpu_dry_run']


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line('markers', 'gpu_dry_run: runs the GPU build of MXNet without a GPU')
