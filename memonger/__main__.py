"""``python -m memonger``."""

from memonger.command import run

run()
