"""Makes the fixture ``gpu_dry_run`` known to the tests in this folder."""

from .dry_run import gpu_dry_run

__all__ = ["gpu_dry_run"]
