"""Flags of the commands that open an engine: which bundle and checkpoints to serve, and sampling parameters."""

from pathlib import Path
from typing import Any, Literal

from absl import flags

from dflash_aot.bin.command_line import choose_pair, default_bundle
from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.requests.sampling_params import PARAMETERS, SamplingParams

HINTS = {  # what applies to dflash-run only
    "max_tokens": "; default: to the end of the grid",
    "trace": " (JSON only)",
    "logprobs": " (JSON only)",
}


class ServedFlags:
    """--bundle, --target, --draft, --k and --require_signature; read once they are parsed."""

    def __init__(self, flag_values: flags.FlagValues):
        self._bundle = flags.DEFINE_string(
            "bundle",
            None,
            "what dflash-precompile built, or the URL where dflash-bundle pushed it; default: the user's cache "
            "directory",
            flag_values=flag_values,
        )
        self._target = flags.DEFINE_string(
            "target", None, "another target checkpoint of the same shapes", flag_values=flag_values
        )
        self._draft = flags.DEFINE_string(
            "draft", None, "another draft checkpoint of the same shapes", flag_values=flag_values
        )
        self._k = flags.DEFINE_string(
            "k", "auto", "tokens verified per round: auto, or one of the grid's", flag_values=flag_values
        )
        self._require_signature = flags.DEFINE_string(
            "require_signature", None, "a public key, PEM: serve only what its owner signed", flag_values=flag_values
        )

    @property
    def bundle(self) -> str:
        """A directory or a URL. Raises BadInput, BadCheckpoint where none is named and the pair's cannot be found."""
        return self._bundle.value or str(default_bundle(*choose_pair(self.target, self.draft)))

    @property
    def target(self) -> str | None:
        return self._target.value

    @property
    def draft(self) -> str | None:
        return self._draft.value

    @property
    def k(self) -> int | Literal["auto"]:
        """Raises BadInput."""
        value: str = self._k.value
        if value == "auto":
            return "auto"
        if not (value.isascii() and value.isdigit()):
            raise BadInput(f"--k {value}: auto, or a whole number of at least 0")
        return int(value)

    @property
    def signed_by(self) -> Path | None:
        return None if self._require_signature.value is None else Path(self._require_signature.value)


class SamplingFlags:
    """A flag for each scalar field of `SamplingParams` but k, which is the engine's, and for the stop texts."""

    def __init__(self, flag_values: flags.FlagValues):
        define: dict[type, Any] = {int: flags.DEFINE_integer, float: flags.DEFINE_float, bool: flags.DEFINE_bool}
        self._flags: dict[str, flags.FlagHolder] = {
            name: define[parameter.type](
                name, parameter.default, parameter.meaning + HINTS.get(name, ""), flag_values=flag_values
            )
            for name, parameter in PARAMETERS.items()
            if parameter.type in define and name != "k"
        }
        self._flags["stop"] = flags.DEFINE_multi_string(
            "stop", [], "a text that ends the output; may be given again", flag_values=flag_values
        )

    @property
    def trace(self) -> bool:
        return self._flags["trace"].value

    def read(self) -> SamplingParams:
        """Raises BadInput."""
        return SamplingParams(**{name: flag.value for name, flag in self._flags.items()})
