"""Serves a bundle: loads executables and weights, and dispatches. Nothing here traces, compiles or knows a model."""

from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.requests.request import AsyncStream, Delta, Result, RoundOutcome, Stream, TokenLogprob
from dflash_aot.runtime.requests.sampling_params import SamplingParams

__all__ = ["AsyncStream", "Delta", "RoundOutcome", "Engine", "Result", "SamplingParams", "Stream", "TokenLogprob"]
