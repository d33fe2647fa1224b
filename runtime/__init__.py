"""Serves a bundle: loads executables and weights, and dispatches. Nothing here traces, compiles or knows a model."""

from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.requests.async_stream import AsyncStream
from dflash_aot.runtime.requests.logprobs import TokenLogprob
from dflash_aot.runtime.requests.request import Delta, Result, RoundOutcome
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.requests.stream import Stream

__all__ = ["AsyncStream", "Delta", "RoundOutcome", "Engine", "Result", "SamplingParams", "Stream", "TokenLogprob"]
