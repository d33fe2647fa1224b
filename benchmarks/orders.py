"""What the processes of ways to decode are told when they start."""

from typing import Literal

import msgspec


class EngineOrder(msgspec.Struct, frozen=True):
    """As `Engine.open` takes it; max_waiting: None for the engine's own."""

    bundle: str
    target: str
    draft: str
    k: int | Literal["auto"]
    max_waiting: int | None = None


class JitOrder(msgspec.Struct, frozen=True):
    """The pair and the grid of a bundle, not its executables. longest: tokens of the longest prompt there will be."""

    bundle: str
    target: str
    draft: str
    k: int
    longest: int


class PartsOrder(msgspec.Struct, frozen=True):
    """A bundle and its pair."""

    bundle: str
    target: str
    draft: str


class TorchOrder(msgspec.Struct, frozen=True):
    """Weights, and how tokens are guessed: not at all, from earlier text, or by the model's own first layers."""

    target: str
    dtype: Literal["float32", "bfloat16"]
    lookup_tokens: int | None = None
    exit_layer: int | None = None
