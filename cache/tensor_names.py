"""Names of checkpoint tensors: linear layers, tensors that are not loaded, the prefix in multimodal checkpoints.

A module's name is that of its tensors without the last part: `model.layers.0.mlp.up_proj`.
"""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

from dflash_aot.cache.bundle.weight_recipe import CheckpointRole, WeightRecipe
from dflash_aot.cache.model_config.module_patterns import ModulePatterns

WEIGHT = ".weight"
# Linear layers of which a quantized checkpoint's config decides which are quantized. Of the head and the routers the
# tensors do: formats differ in whether these count as linear layers.
LINEAR_LAYERS = re.compile(r"(_proj|\.in_proj_\w+|\.fc)$")
# Modules that are not loaded: a multimodal target's vision tower, its head for multi-token prediction, and what
# speculators stores of the target in a draft.
IGNORED_MODULES: dict[CheckpointRole, tuple[str, ...]] = {
    "target": ("model.visual.*", "mtp.*"),
    "draft": ("verifier_*",),
}
# Some of them, on which the patterns of a config file are tried.
IGNORED_EXAMPLES: dict[CheckpointRole, tuple[str, ...]] = {
    "target": (
        "model.visual.blocks.0.attn.qkv",
        "model.visual.merger.linear_fc1",
        "mtp.layers.0.mlp.up_proj",
        "mtp.fc",
    ),
    "draft": ("verifier_lm_head", "verifier_norm"),
}
# Multimodal checkpoints name the text model's tensors so.
TEXT_PREFIX, NESTED_TEXT_PREFIX = "model.", "model.language_model."


def is_linear_layer(module: str) -> bool:
    """Whether a module is a linear layer that is quantized unless the config lists it."""
    return LINEAR_LAYERS.search(module) is not None


def is_ignored(module: str, role: CheckpointRole) -> bool:
    """Whether a module is never loaded."""
    return any(fnmatch(module, pattern) for pattern in IGNORED_MODULES[role])


def nest_name(name: str) -> str:
    """Returns the name of a tensor or module as multimodal checkpoints have it."""
    return name.replace(TEXT_PREFIX, NESTED_TEXT_PREFIX, 1) if name.startswith(TEXT_PREFIX) else name


def names_any(listed: ModulePatterns, modules: Iterable[str], role: CheckpointRole) -> bool:
    """Whether a list of a config file is empty, or names a module of the model in either spelling or an ignored one."""
    modules = set(modules)
    if any(is_ignored(name, role) for name in listed.names):
        return True
    return listed.names_any({*modules, *map(nest_name, modules), *IGNORED_EXAMPLES[role]})


def list_modules(recipes: Iterable[WeightRecipe]) -> set[str]:
    """Returns the modules whose tensors make weight arguments."""
    return {placement.tensor.removesuffix(WEIGHT) for recipe in recipes for placement in recipe.placements}


def list_unconverted(recipes: Sequence[WeightRecipe], role: CheckpointRole) -> set[str]:
    """Returns the linear layers that an int8 bundle keeps as floats: a recurrent layer's in_proj_a and in_proj_b."""
    own = (recipe for recipe in recipes if recipe.checkpoint == role and not recipe.encoding)
    return {module for module in list_modules(own) if is_linear_layer(module)}
