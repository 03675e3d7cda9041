from .dry_run import gpu_dry_run

__all__ = ["gpu_dry_run"]
