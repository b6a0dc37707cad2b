"""Numbers in words, and texts of others made fit to print."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def text_of_bytes(count: float) -> str:
    """Such as ``1.5 GiB``."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def printable(text: str) -> str:
    """The text without anything that a terminal would obey."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)
