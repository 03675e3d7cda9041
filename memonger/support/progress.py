"""A bar on a terminal for what takes over a second; nothing where nobody looks."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm


class Progress:
    """A progress bar on stderr, as a context manager; called with the share that is done, 0 to 1.

    Nothing is shown where stderr is no terminal, and nothing is left when it ends.
    """

    def __init__(self, what: str) -> None:
        self._bar = tqdm(
            total=1.0,
            desc=what,
            delay=1,
            leave=False,
            disable=None,  # where stderr is no terminal
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
        )

    def __call__(self, done: float) -> None:
        self._bar.update(min(done, 1.0) - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
