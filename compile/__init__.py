"""Ahead-of-time compilation: model code, programs, and `precompile`, which builds a bundle."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_aot.compile.pipeline.compilation_manager import BuildObserver, BuildPhase, Progress
    from dflash_aot.compile.pipeline.precompile import (
        BuildPlan,
        BuildReport,
        plan_build,
        precompile,
        rebuild,
    )

__all__ = [
    "BuildObserver",
    "BuildPhase",
    "BuildPlan",
    "BuildReport",
    "Progress",
    "plan_build",
    "precompile",
    "rebuild",
]


def __getattr__(name: str) -> object:
    """Imports a public name at its first use, so that compiler processes start without the models and flax."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dflash_aot.compile.pipeline import compilation_manager, precompile  # noqa: PLC0415

    return getattr(precompile if hasattr(precompile, name) else compilation_manager, name)
