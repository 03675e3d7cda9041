"""The exceptions of memonger: one at the root; every message names thing and remedy."""


class MemongerError(ValueError):
    """Raised for every mistake that memonger can see: in the network, the shapes or the call."""


class MXNetImportError(MemongerError, ImportError):
    """Raised when a usable MXNet 1.9 cannot be imported; the message says what to install."""


class TooLargeError(MemongerError):
    """A tensor of more elements than MXNet can count."""


class BudgetError(MemongerError):
    """A budget of memory that no plan keeps.

    Attributes
    ----------
    least_bytes : int
        The least memory that was found.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
