"""`jit_quickly`: `jax.jit` without optimizations, because compiling takes most of the time of these tests."""

from functools import partial

import jax

QUICK: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later versions have no such option
    QUICK["xla_cpu_use_fusion_emitters"] = False
jit_quickly = partial(jax.jit, compiler_options=QUICK)
