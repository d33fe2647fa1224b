"""Serves a bundle: loads executables and weights, and dispatches. Nothing here traces, compiles or knows a model."""

from dflash_aot.runtime.engine import Engine, Stream
from dflash_aot.runtime.request import Delta, Result, SamplingParams

__all__ = ["Delta", "Engine", "Result", "SamplingParams", "Stream"]
