"""The exceptions of memonger: one at the root; every message names thing and remedy."""


class MemongerError(ValueError):
    """Raised for every mistake that memonger can see: in the network, the shapes or the call."""


class MXNetImportError(MemongerError, ImportError):
    """Raised when a usable MXNet 1.9 cannot be imported; the message says what to install."""
