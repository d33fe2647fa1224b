"""Ahead-of-time compilation: model code, programs, and `precompile`, which builds a bundle."""

from dflash_aot.compile.pipeline.build_report import BuildPlan, BuildReport
from dflash_aot.compile.pipeline.observer import BuildObserver, BuildPhase, Progress
from dflash_aot.compile.pipeline.precompile import plan_build, precompile, rebuild

__all__ = ["BuildObserver", "BuildPhase", "BuildPlan", "BuildReport", "Progress", "plan_build", "precompile", "rebuild"]
