"""Serves a bundle: loads executables and weights, and dispatches. Nothing here traces, compiles or knows a model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_aot.runtime.engine import Engine
    from dflash_aot.runtime.requests.request import (
        AsyncStream,
        Delta,
        Result,
        RoundOutcome,
        Stream,
        TokenLogprob,
    )
    from dflash_aot.runtime.requests.sampling_params import SamplingParams

__all__ = [
    "AsyncStream",
    "Delta",
    "RoundOutcome",
    "Engine",
    "Result",
    "SamplingParams",
    "Stream",
    "TokenLogprob",
]


def __getattr__(name: str) -> object:
    """Imports a public name at its first use, so that the text layer can be used without importing JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dflash_aot.runtime import engine  # noqa: PLC0415
    from dflash_aot.runtime.requests import request, sampling_params  # noqa: PLC0415

    return next(
        getattr(module, name)
        for module in (engine, request, sampling_params)
        if hasattr(module, name)
    )
