"""Out-of-memory report: turns the compiler's RESOURCE_EXHAUSTED into one sentence with figures."""

import re

UNIT_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([\d.]+)([KMGT]?)"
# Messages of libtpu 0.0.42: before and after buffer assignment.
NEEDED_PATTERNS = (
    re.compile(rf"total memory required for HLO temporaries \({SIZE}\) exceeds available HBM \({SIZE}\)"),
    re.compile(rf"Used {SIZE} of {SIZE} hbm"),
)
EXCESS_PATTERN = re.compile(rf"Exceeded hbm capacity by {SIZE}")
ALLOCATION_PATTERN = re.compile(rf"^ +\d+\. Size: {SIZE}\n((?:     .*\n?)*)", re.MULTILINE)
LISTED_BUFFERS = 3


def explain_out_of_memory(error: BaseException) -> str | None:
    """The memory that was needed and missing, and the largest buffers if the compiler names them.

    None for errors other than RESOURCE_EXHAUSTED.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    found = next((match for pattern in NEEDED_PATTERNS if (match := pattern.search(text))), None)
    if not found:
        return f"needs more device memory than there is: {text.splitlines()[0]}"
    needed, available = _parse_bytes(*found.groups()[:2]), _parse_bytes(*found.groups()[2:])
    excess = EXCESS_PATTERN.search(text)  # more exact than the difference of rounded figures
    missing = _parse_bytes(*excess.groups()) if excess else needed - available
    sentence = f"needs {_format_bytes(needed)} of device memory, {_format_bytes(missing)} more than there is"
    largest = ", ".join(_list_largest_buffers(text))
    return f"{sentence}; the largest buffers: {largest}" if largest else sentence


def _list_largest_buffers(text: str) -> list[str]:
    """Shapes (or labels) and sizes of the largest buffers, the largest first, each once."""
    found = {}
    for number, unit, details in ALLOCATION_PATTERN.findall(text):
        name = re.search(r"Shape: (\S+?)(?:\{|$)", details, re.MULTILINE) or re.search(r"XLA label: (.+)", details)
        if name:
            found[name[1]] = _parse_bytes(number, unit)
    ordered = sorted(found.items(), key=lambda one: -one[1])
    return [f"{name} {_format_bytes(size)}" for name, size in ordered[:LISTED_BUFFERS]]


def _parse_bytes(number: str, unit: str) -> float:
    return float(number) * UNIT_BYTES[unit]


def _format_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
