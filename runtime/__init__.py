"""Serves a bundle: loads executables and weights, and dispatches. Nothing here traces, compiles or knows a model."""

from dflash_aot.runtime.async_stream import AsyncStream
from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.logprobs import TokenLogprob
from dflash_aot.runtime.request import Delta, Drafting, Result
from dflash_aot.runtime.sampling_params import SamplingParams
from dflash_aot.runtime.stream import Stream

__all__ = ["AsyncStream", "Delta", "Drafting", "Engine", "Result", "SamplingParams", "Stream", "TokenLogprob"]
