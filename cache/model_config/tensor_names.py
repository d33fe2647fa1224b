"""Names of checkpoint tensors and modules: linear layers, tensors that are not loaded, lists of unquantized modules.

A module's name is that of its tensors without the last part: `model.layers.0.mlp.up_proj`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch

import msgspec

from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.weight_recipe import CheckpointRole, WeightRecipe

# -- lists of module names and `re:` patterns, as quantized checkpoints name the modules that they leave out
#
# A pattern comes from a config file, so it could take Python's `re` exponential time. Patterns are matched by Rust's
# regex engine, which takes linear time and refuses look-around and back-references.

PATTERN_PREFIX = "re:"
HEAD = "lm_head"  # a module of every model, also where the checkpoint has no tensor of it
MAX_PATTERNS = 64
MAX_PATTERN_CHARACTERS = 1024


class ModulePatterns(msgspec.Struct, frozen=True):
    """A list of modules of a config file.

    Attributes:
        key: where the list is, as in messages.
        names: plain names.
        patterns: regular expressions that match a prefix of a name, as `re.match`.
        parts: a plain name also stands for the modules inside it, and may leave out the first
            parts of its path.
    """

    key: str
    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    parts: bool = False

    def select(self, modules: Iterable[str]) -> frozenset[str]:
        """Returns the modules that are on the list."""
        matches = [_compile(pattern) for pattern in self.patterns]
        return frozenset(
            module
            for module in modules
            if self._is_named(module) or any(match(module) for match in matches)
        )

    def names_any(self, modules: Iterable[str]) -> bool:
        """Whether the list is empty, or names one of a model's modules, a part that holds some, or the head."""
        modules = set(modules)
        split = [name.split(".") for name in modules]
        parents = {".".join(steps[:cut]) for steps in split for cut in range(1, len(steps))}
        return not (self.names or self.patterns) or bool(self.select(modules | parents | {HEAD}))

    def _is_named(self, module: str) -> bool:
        if module in self.names or not self.parts:
            return module in self.names
        steps = module.split(".")
        cuts = range(1, len(steps))
        return any(
            ".".join(steps[:cut]) in self.names or ".".join(steps[cut:]) in self.names
            for cut in cuts
        )


def compile_patterns(
    section: ConfigFile, key: str, entries: Sequence[str], parts: bool
) -> ModulePatterns:
    """Sorts a list of `section` into names and patterns. Raises BadCheckpoint for a pattern that cannot be matched."""
    patterns = tuple(
        entry.removeprefix(PATTERN_PREFIX) for entry in entries if entry.startswith(PATTERN_PREFIX)
    )
    names = frozenset(entry for entry in entries if not entry.startswith(PATTERN_PREFIX))
    for entry in entries if parts else ():
        if not _is_plain(entry):
            raise section.refusal(key, entry, "expected names of modules without wildcards")
    if len(patterns) > MAX_PATTERNS:
        raise section.refusal(key, entries, f"expected at most {MAX_PATTERNS} patterns")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise section.refusal(
                key, pattern, f"expected at most {MAX_PATTERN_CHARACTERS} characters in a pattern"
            )
        try:
            _compile(pattern)
        except ValueError as error:
            raise section.refusal(key, PATTERN_PREFIX + pattern, str(error)) from error
    return ModulePatterns(section.where(key), names, patterns, parts)


def _is_plain(name: str) -> bool:
    return all(part.replace("_", "a").isalnum() for part in name.split("."))


def _compile(pattern: str) -> Callable[[str], bool]:
    """Returns a function that matches the beginning of a text. Raises ValueError for an unsupported pattern."""
    # pydantic_core has Rust's engine. Its import takes 40 ms, and few checkpoints have patterns.
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # noqa: PLC0415

    try:
        # The pattern alone comes first: with an unbalanced parenthesis it fails, but might compile inside the group.
        for text in (pattern, rf"\A(?:{pattern})"):
            validator = SchemaValidator(
                core_schema.str_schema(pattern=text, regex_engine="rust-regex")
            )
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].removeprefix("error: ").strip()
        raise ValueError(
            f"not a regular expression that is matched in linear time: {reason}"
        ) from error
    return validator.isinstance_python


# -- tensors and modules

WEIGHT = ".weight"
# Linear layers of which a quantized checkpoint's config decides which are quantized. Of the head and the routers the
# tensors decide, because formats differ in whether these count as linear layers.
LINEAR_LAYERS = re.compile(r"(_proj|\.in_proj_\w+|\.fc)$")
# Buffers of rotary embeddings, which older versions of transformers stored: computed from the config, as everywhere.
ROTARY_BUFFERS = tuple(
    f"*rotary_emb.{buffer}"
    for buffer in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "cos_sin_cache")
)
# Modules and tensors that are not loaded: a multimodal target's other towers, its head for multi-token prediction, and
# what speculators stores of the target in a draft.
IGNORED_MODULES: dict[CheckpointRole, tuple[str, ...]] = {
    "target": (
        "model.visual.*",
        "model.vision_*",
        "model.audio_tower*",
        "model.embed_vision*",
        "model.embed_audio*",
        "mtp.*",
        *ROTARY_BUFFERS,
    ),
    "draft": ("verifier_*", *ROTARY_BUFFERS),
}
# Examples of them, on which the patterns of a config file are tried.
IGNORED_EXAMPLES: dict[CheckpointRole, tuple[str, ...]] = {
    "target": (
        "model.visual.blocks.0.attn.qkv",
        "model.visual.merger.linear_fc1",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear",
        "model.embed_vision.embedding_projection",
        "model.audio_tower.layers.0.mlp.up_proj",
        "model.embed_audio.embedding_projection",
        "mtp.layers.0.mlp.up_proj",
        "mtp.fc",
    ),
    "draft": ("verifier_lm_head", "verifier_norm"),
}
# Projections of a Gated DeltaNet layer, and the module that holds them in Qwen3-Next's layout.
FUSED_PROJECTIONS = {
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
NUMBERED_EXPERTS = re.compile(r"\.experts\.\d+$", re.ASCII)
# Prefixes of the text model's tensors, the second in multimodal checkpoints.
TEXT_PREFIX = "model."
NESTED_TEXT_PREFIX = "model.language_model."


def is_linear_layer(module: str) -> bool:
    """Whether a module is a linear layer that is quantized unless the config lists it."""
    return LINEAR_LAYERS.search(module) is not None


def is_ignored(module: str, role: CheckpointRole) -> bool:
    """Whether a module or tensor is never loaded."""
    return any(fnmatch(module, pattern) for pattern in IGNORED_MODULES[role])


def nest_name(name: str) -> str:
    """Returns the name of a tensor or module as multimodal checkpoints have it."""
    return (
        name.replace(TEXT_PREFIX, NESTED_TEXT_PREFIX, 1) if name.startswith(TEXT_PREFIX) else name
    )


def name_fused(module: str) -> str:
    """Returns the name that a list may have for a linear layer's module, where others are fused with it."""
    prefix, dot, last = module.rpartition(".")
    if NUMBERED_EXPERTS.search(prefix):  # one tensor holds gates and ups of all
        last = "gate_up_proj" if last in ("gate_proj", "up_proj") else last
        return NUMBERED_EXPERTS.sub(".experts", prefix) + dot + last
    return prefix + dot + FUSED_PROJECTIONS.get(last, last)


def names_any(listed: ModulePatterns, modules: Iterable[str], role: CheckpointRole) -> bool:
    """Whether a list of a config file is empty, or names a module of the model in either spelling or an ignored one."""
    modules = set(modules)
    if any(is_ignored(name, role) for name in listed.names):
        return True
    other = (*map(nest_name, modules), *map(name_fused, modules), *IGNORED_EXAMPLES[role])
    return listed.names_any({*modules, *other})


def list_modules(recipes: Iterable[WeightRecipe]) -> set[str]:
    """Returns the modules whose tensors make weight arguments."""
    return {
        placement.tensor.removesuffix(WEIGHT)
        for recipe in recipes
        for placement in recipe.placements
    }


def list_unconverted(recipes: Sequence[WeightRecipe], role: CheckpointRole) -> set[str]:
    """Returns the linear layers that an int8 bundle keeps as floats: a recurrent layer's in_proj_a and in_proj_b."""
    own = (recipe for recipe in recipes if recipe.checkpoint == role and not recipe.encoding)
    return {module for module in list_modules(own) if is_linear_layer(module)}
