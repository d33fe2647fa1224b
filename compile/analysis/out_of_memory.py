"""The compiler's RESOURCE_EXHAUSTED as one sentence with figures."""

import re

UNIT_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([\d.]+)([KMGT]?)"
# As libtpu 0.0.42 says it: before it has placed anything, and after.
NEEDED_PATTERNS = (
    re.compile(rf"total memory required for HLO temporaries \({SIZE}\) exceeds available HBM \({SIZE}\)"),
    re.compile(rf"Used {SIZE} of {SIZE} hbm"),
)
EXCESS_PATTERN = re.compile(rf"Exceeded hbm capacity by {SIZE}")
ALLOCATION_PATTERN = re.compile(rf"^ +\d+\. Size: {SIZE}\n((?:     .*\n?)*)", re.MULTILINE)
LISTED_BUFFERS = 3


def explain_out_of_memory(error: BaseException) -> str | None:
    """What was needed, what there is, and the largest buffers where the compiler names them; None for other errors."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    found = next((match for pattern in NEEDED_PATTERNS if (match := pattern.search(text))), None)
    if not found:
        return f"it needs more memory than there is: {text.splitlines()[0]}"
    needed, available = _count(*found.groups()[:2]), _count(*found.groups()[2:])
    excess = EXCESS_PATTERN.search(text)  # said by the compiler more exactly than the difference of rounded figures
    missing = _count(*excess.groups()) if excess else needed - available
    sentence = f"it needs {_describe(needed)} of device memory, {_describe(missing)} more than there is"
    largest = ", ".join(_describe_largest(text))
    return f"{sentence}; the largest buffers: {largest}" if largest else sentence


def _describe_largest(text: str) -> list[str]:
    """Sizes and shapes or labels, the largest first, each once."""
    found = {}
    for number, unit, details in ALLOCATION_PATTERN.findall(text):
        name = re.search(r"Shape: (\S+?)(?:\{|$)", details, re.MULTILINE) or re.search(r"XLA label: (.+)", details)
        if name:
            found[name[1]] = _count(number, unit)
    ordered = sorted(found.items(), key=lambda one: -one[1])
    return [f"{name} {_describe(size)}" for name, size in ordered[:LISTED_BUFFERS]]


def _count(number: str, unit: str) -> float:
    """Bytes."""
    return float(number) * UNIT_BYTES[unit]


def _describe(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
