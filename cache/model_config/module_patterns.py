"""Lists of module names and `re:` patterns, as quantized checkpoints name the modules that they leave out.

A pattern comes from a config file, so it could take Python's `re` exponential time. Patterns are matched by Rust's
regex engine, which takes linear time and refuses what it cannot match so: look-around and back-references.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from dflash_aot.cache.model_config.config_file import ConfigFile

PATTERN_PREFIX = "re:"
HEAD = "lm_head"  # a module of every model, also where the checkpoint has no tensor of it
MAX_PATTERNS, MAX_PATTERN_LETTERS = 64, 1024


class ModulePatterns(msgspec.Struct, frozen=True):
    """A list of modules of a config file.

    key: where the list is, as in messages.
    names: plain names.
    patterns: regular expressions that match a prefix of a name, as `re.match`.
    parts: a plain name also stands for the modules inside it, and may leave out the first parts of its path.
    """

    key: str
    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    parts: bool = False

    def select(self, modules: Iterable[str]) -> frozenset[str]:
        """Returns the modules that are on the list."""
        matches = [_compile(pattern) for pattern in self.patterns]
        return frozenset(
            module for module in modules if self._is_named(module) or any(match(module) for match in matches)
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
        return any(".".join(steps[:cut]) in self.names or ".".join(steps[cut:]) in self.names for cut in cuts)


def compile_patterns(section: ConfigFile, key: str, entries: Sequence[str], parts: bool) -> ModulePatterns:
    """Sorts a list of `section` into names and patterns. Raises BadCheckpoint for a pattern that cannot be matched."""
    patterns = tuple(entry.removeprefix(PATTERN_PREFIX) for entry in entries if entry.startswith(PATTERN_PREFIX))
    names = frozenset(entry for entry in entries if not entry.startswith(PATTERN_PREFIX))
    for entry in entries if parts else ():
        if not _is_plain(entry):
            raise section.refusal(key, entry, "expected names of modules without wildcards")
    if len(patterns) > MAX_PATTERNS:
        raise section.refusal(key, entries, f"expected at most {MAX_PATTERNS} patterns")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_LETTERS:
            raise section.refusal(key, pattern, f"expected at most {MAX_PATTERN_LETTERS} letters in a pattern")
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
            validator = SchemaValidator(core_schema.str_schema(pattern=text, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].removeprefix("error: ").strip()
        raise ValueError(f"not a regular expression that is matched in linear time: {reason}") from error
    return validator.isinstance_python
