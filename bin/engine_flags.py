"""The flags that say what is served, of dflash-run and dflash-serve alike."""

from pathlib import Path
from typing import Literal

from absl import flags

from dflash_aot.bin.command_line import choose_pair, default_bundle
from dflash_aot.cache.errors import BadInput


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
