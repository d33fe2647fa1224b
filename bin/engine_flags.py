"""Flags of dflash-run and dflash-serve: bundle, checkpoints, K and hosts, and the sampling parameters."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags

from dflash_aot.bin.command_line import (
    add_revision,
    choose_draft,
    choose_pair,
    default_bundle,
    define_revisions,
)
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import BadInput, HostFailed
from dflash_aot.cache.model_config.speculative_config import (
    KChoice,
    SpeculativeConfig,
    parse_speculative_config,
)
from dflash_aot.cache.remote.transfer import locate_bundle
from dflash_aot.runtime.engine_parts import follow
from dflash_aot.runtime.host_group import (
    FollowerGroup,
    HostRole,
    find_group,
    join_group,
    read_role,
)
from dflash_aot.runtime.requests.sampling_params import PARAMETERS, SamplingParams

HINTS = {  # added to the help texts of dflash-run
    "max_tokens": "; default: as many as the grid holds",
    "trace": " (with --json or --input)",
    "logprobs": " (with --json or --input)",
    "prompt_logprobs": " (with --json or --input)",
}


class EngineFlags:
    """Defines --bundle, --target, --draft, --k, --speculative_config, --require_signature and the flags of a group.

    The properties are read after parsing.
    """

    def __init__(self, flag_values: flags.FlagValues):
        self._bundle = flags.DEFINE_string(
            "bundle",
            None,
            "a bundle's directory, or the URL that dflash-bundle pushed it to; default: the directory of the pair in "
            "the user's cache",
            flag_values=flag_values,
        )
        self._target = flags.DEFINE_string(
            "target",
            None,
            "a target checkpoint with the same shapes, instead of the bundle's",
            flag_values=flag_values,
        )
        self._draft = flags.DEFINE_string(
            "draft",
            None,
            "a draft checkpoint with the same shapes, instead of the bundle's",
            flag_values=flag_values,
        )
        self._revisions = define_revisions(flag_values)
        self._k = flags.DEFINE_string(
            "k",
            "auto",
            "draft tokens verified per round: a K of the grid, or auto to choose K while serving",
            flag_values=flag_values,
        )
        self._speculative = flags.DEFINE_string(
            "speculative_config",
            None,
            "instead of --draft and --k: draft and K, also K by the requests in the round, as in vLLM's JSON",
            flag_values=flag_values,
        )
        self._require_signature = flags.DEFINE_string(
            "require_signature",
            None,
            "PEM file of a public key; refuse a bundle that the key's owner has not signed",
            flag_values=flag_values,
        )
        self._hosts = flags.DEFINE_integer(
            "hosts",
            None,
            "hosts that serve the bundle together; default: as TPU_WORKER_HOSTNAMES says",
            1,
            flag_values=flag_values,
        )
        self._rank = flags.DEFINE_integer(
            "host_rank", 0, "this host's number, from 0, which leads", 0, flag_values=flag_values
        )
        self._leader = flags.DEFINE_string(
            "leader",
            None,
            "HOST:PORT at which the hosts meet, of host 0; needed with --hosts",
            flag_values=flag_values,
        )

    @property
    def bundle(self) -> str:
        """A directory or a URL. Raises BadInput, and BadCheckpoint where --bundle is missing and --draft not found."""
        return self._bundle.value or str(default_bundle(*choose_pair(self.target, self.draft)))

    @property
    def target(self) -> str | None:
        """The value of --target, with its revision. Raises BadInput for a revision without a hub id."""
        return add_revision("target", self._target.value, self._revisions["target"].value)

    @property
    def draft(self) -> str | None:
        """The draft, as `target`. Raises BadInput where --draft and --speculative_config name different drafts."""
        draft = choose_draft(self._draft.value, self._read_speculative_config())
        return add_revision("draft", draft, self._revisions["draft"].value)

    @property
    def k(self) -> KChoice:
        """The choice of K. Raises BadInput for values other than "auto" or a number from 0 on, and for two choices."""
        config = self._read_speculative_config()
        chosen = config.num_speculative_tokens_per_batch_size or config.num_speculative_tokens
        if chosen is not None:
            if self._k.present:
                raise BadInput(
                    f"--k {self._k.value}: --speculative_config chooses K too. Give one of them"
                )
            return chosen
        value: str = self._k.value
        if value == "auto":
            return "auto"
        if not (value.isascii() and value.isdigit()):
            raise BadInput(f"--k {value}: must be auto, or a whole number of at least 0")
        return int(value)

    def join_hosts(self) -> bool:
        """Joins the hosts that serve the bundle, where there are several. Starts JAX then.

        Returns True where this process followed the leader, until its end. Raises BadInput, and as `join_group` and
        `follow`.
        """
        if (role := self._read_role()) is None:
            return False
        bundle = locate_bundle(self.bundle, self.signed_by)
        manifest = read_manifest(bundle, self.signed_by)
        if manifest.environment.hosts == 1 and not self._hosts.value:
            return False  # each host of the slice serves by itself
        select_jax_platforms(manifest.environment.platform)
        group = join_group(role, manifest)
        if not isinstance(group, FollowerGroup):
            return False
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader answers what is open, and ends
        follow(group, bundle, self.target, self.draft, self.signed_by)
        return True

    def _read_role(self) -> HostRole | None:
        if self._hosts.value is None:
            if self._rank.present or self._leader.present:
                raise BadInput("--host_rank and --leader need --hosts")
            return read_role(os.environ)
        if self._hosts.value == 1:
            return None
        if self._leader.value is None or self._rank.value >= self._hosts.value:
            raise BadInput(
                f"--hosts {self._hosts.value}: --leader HOST:PORT is needed, and a --host_rank below"
            )
        return HostRole(self._hosts.value, self._rank.value, self._leader.value)

    def _read_speculative_config(self) -> SpeculativeConfig:
        return parse_speculative_config(self._speculative.value or "{}")

    @property
    def signed_by(self) -> Path | None:
        """The public key of --require_signature."""
        return (
            None if self._require_signature.value is None else Path(self._require_signature.value)
        )


class SamplingFlags:
    """Defines --stop and a flag for each scalar field of `SamplingParams`, except k, which `EngineFlags` defines."""

    def __init__(self, flag_values: flags.FlagValues):
        define: dict[type, Any] = {int: flags.DEFINE_integer, float: flags.DEFINE_float}
        define |= {bool: flags.DEFINE_bool, str: flags.DEFINE_string}
        self._flags: dict[str, flags.FlagHolder] = {
            name: define[parameter.type](
                name,
                parameter.default,
                parameter.meaning + HINTS.get(name, ""),
                flag_values=flag_values,
            )
            for name, parameter in PARAMETERS.items()
            if parameter.type in define and name != "k"
        }
        self._flags["stop"] = flags.DEFINE_multi_string(
            "stop", [], "a text that ends the output; may be repeated", flag_values=flag_values
        )

    @property
    def trace(self) -> bool:
        """Whether --trace is given."""
        return self._flags["trace"].value

    def read(self) -> SamplingParams:
        """The parameters as parsed. Raises BadInput for a value out of range."""
        return SamplingParams(**{name: flag.value for name, flag in self._flags.items()})


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code; one of a group without JAX's own end, which would wait for all hosts."""
    if not jax.distributed.is_initialized():
        sys.exit(code)
    group = find_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(HostFailed.exit_code if group and group.failure else code)
