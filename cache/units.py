"""Byte counts for people; the one formatter that reports of all rooms share."""


def format_bytes(count: float) -> str:
    """Such as "512 B" or "1.3 GB", in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
