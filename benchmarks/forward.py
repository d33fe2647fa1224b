"""What is asked of a process that makes one pass of the target at a time, and what it answers."""

from typing import Literal

import msgspec

Program = Literal["verify", "prefill"]
Dtype = Literal["float32", "bfloat16"]


class BundleForward(msgspec.Struct, frozen=True):
    """A bundle's own executables. text: token ids, as many as the bundle's longest length."""

    bundle: str
    target: str
    draft: str
    text: list[int]


class TorchForward(msgspec.Struct, frozen=True):
    """PyTorch transformers' model on the same weights."""

    target: str
    dtype: Dtype
    text: list[int]


class Forward(msgspec.Struct, frozen=True, tag=True):
    """The last `rows` of the first `length` tokens of the text, behind the kv of those before them, `calls` times.

    A verification chooses a token behind every row, a prefill behind the last one. Answered by Forwarded.
    """

    program: Program
    rows: int
    length: int
    calls: int


class Forwarded(msgspec.Struct, frozen=True):
    """seconds: of each call, until all that it computes is there. token_ids: what was chosen."""

    seconds: list[float]
    token_ids: list[int]


class Peaks(msgspec.Struct, frozen=True, tag=True):
    """How fast this machine is at best, as far as this process knows how: `calls` times. Answered by Peaked."""

    calls: int


class Peaked(msgspec.Struct, frozen=True):
    """Of each call: bytes per second read from memory, and operations per second in a product, in the way's dtype."""

    bytes_per_second: list[float]
    flops_per_second: list[float]
