"""Which of JAX's platforms a process starts."""

import importlib.util
import os

import jax

from dflash_aot.cache.environment import is_tpu_attached


def select_jax_platforms(platform: str | None) -> None:
    """Keeps JAX from starting what is not used. `platform` is what will be; None: whatever is attached.

    That is an accelerator, and libtpu where there is no TPU: it says so in many lines.
    """
    if platform == "cpu" or (platform == "tpu" and not is_tpu_attached()):
        jax.config.update("jax_platforms", "cpu")
    elif platform == "tpu":
        jax.config.update("jax_platforms", "tpu,cpu")
    elif not (os.environ.get("JAX_PLATFORMS") or is_tpu_attached() or _has_gpu_plugin()):
        jax.config.update("jax_platforms", "cpu")


def _has_gpu_plugin() -> bool:
    """Whether JAX can use a GPU, as far as packages go."""
    return importlib.util.find_spec("jax_plugins") is not None
