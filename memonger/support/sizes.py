"""Sizes of memory in words."""

KB, MB = 2**10, 2**20


def in_words(nbytes: float) -> str:
    """Bytes in MB (2**20 bytes), or in KB (2**10 bytes) where they are fewer than one MB."""
    if 0 < abs(nbytes) < MB:
        return f"{nbytes / KB:.1f} KB"
    return f"{nbytes / MB:.1f} MB"
