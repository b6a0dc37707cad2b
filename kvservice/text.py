"""Numbers in words."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def text_of_bytes(count: float) -> str:
    """Such as ``1.5 GiB``."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
