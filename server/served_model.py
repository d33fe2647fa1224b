"""The server's state, and its model: an engine with its name, tokenizer, chat template and defaults for requests."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.files.locations import is_url
from dflash_aot.cache.model_config.speculative_config import KChoice
from dflash_aot.cache.printable import escape_line
from dflash_aot.cache.remote.transfer import locate_bundle
from dflash_aot.cache.sampling_state import needs_sampling_state
from dflash_aot.runtime.engine import MAX_WAITING, Engine
from dflash_aot.runtime.metrics.counters import Watchdog
from dflash_aot.runtime.text.chat_template import read_chat_template, render_chat
from dflash_aot.runtime.text.tokenizer import Tokenizer
from dflash_aot.server.api_errors import ApiError, shutting_down
from dflash_aot.server.chat_families import (
    Channels,
    ToolFamily,
    find_channels,
    find_tool_family,
)
from dflash_aot.server.limits import ApiKeys, ServerLimits
from dflash_aot.server.token_formatting import TokenFormatter

logger = logging.getLogger(__name__)
NO_TEMPLATE = "this model has no chat template"
PROBE = [{"role": "user", "content": "a"}]
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "a",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "a"}},
        },
    },
}
MAX_NORMALIZED_CHARACTERS = 4  # that a tokenizer's normalizer joins into a character (NFC)


@dataclass(frozen=True)
class ServingConfig:
    """What to serve. Fields without a comment are arguments of `Engine.open`."""

    bundle: str
    target: str | None = None
    draft: str | None = None
    k: KChoice = "auto"
    max_waiting: int = MAX_WAITING
    require_signature: Path | None = None
    preload: bool = True
    prefix_caching: bool = True
    kv_offloading_size: float = 0
    name: str | None = None  # of the model; None: the target's name in the bundle
    # Default for requests; None: 1, or 0 if the bundle cannot sample.
    temperature: float | None = None
    prompt_tokens: int | None = None  # limit for one prompt; None: what the grid holds


@dataclass(frozen=True)
class ServedModel:
    """An opened model."""

    engine: Engine
    name: str
    temperature: float  # default for requests
    max_prompt_tokens: int
    max_prompt_characters: int  # a longer text always has more than `max_prompt_tokens`
    chat_refusal: str | None  # why chats are refused; None where they are served
    # How the model writes tool calls; None if its chat template knows no tools.
    tool_family: ToolFamily | None
    channels: Channels | None  # the markers of its thinking; None for a template without any
    token_formatter: TokenFormatter
    # Of bundle and weights: with another fingerprint the same request may get another text.
    fingerprint: str
    registry: CollectorRegistry  # the engine's metrics

    @property
    def capacity(self) -> int:
        """Positions of a slot, for the prompt and all generated tokens but the last."""
        return self.engine.manifest.grid.capacity

    @property
    def ks(self) -> Sequence[int]:
        """The values of K that requests may choose."""
        return [k for k in self.engine.manifest.grid.k if k <= self.engine.k]

    @property
    def can_sample(self) -> bool:
        return _can_sample(self.engine)

    def require_tokenizer(self, field: str) -> Tokenizer:
        """The target's tokenizer. Raises ApiError, which names the field that needs the tokenizer."""
        try:
            return self.engine.tokenizer
        except BadCheckpoint as error:
            message = "this model was opened without a tokenizer: give token ids"
            raise ApiError(400, message, "no_tokenizer", field) from error

    def list_properties(self) -> Mapping[str, Any]:
        """`dflash` of /v1/models: what the bundle was built for, and defaults."""
        manifest = self.engine.manifest
        return {
            "k": self.ks,
            "block": manifest.draft.facts.block,
            "batch": manifest.grid.batch,
            "sampling": manifest.sampling,
            "temperature": self.temperature,
            "chat": self.chat_refusal is None,
            "chat_refusal": self.chat_refusal,
            "tools": self.tool_family is not None,
        }


def open_model(config: ServingConfig, on_phase: Callable[[str], None]) -> ServedModel:
    """Opens the engine and reads what requests need. `on_phase` is called with the name of each phase when it begins.

    Raises what `Engine.open` raises.
    """
    if is_url(config.bundle):
        on_phase("fetch")
    bundle = locate_bundle(config.bundle, config.require_signature)
    select_jax_platforms(read_manifest(bundle, config.require_signature).environment.platform)
    engine = Engine.open(
        bundle,
        config.target,
        config.draft,
        k=config.k,
        max_waiting=config.max_waiting,
        require_signature=config.require_signature,
        preload=config.preload,
        on_phase=on_phase,
        prefix_caching=config.prefix_caching,
        kv_offloading_size=config.kv_offloading_size,
    )
    try:
        on_phase("tokenizer")
        return _make_model(config, engine)
    except BaseException:
        engine.close()
        raise


def _make_model(config: ServingConfig, engine: Engine) -> ServedModel:
    """Loads what the first request would otherwise wait for. Raises BadCheckpoint, BadInput."""
    name = _choose_name(config, engine)
    has_tokenizer = (engine.target / "tokenizer.json").exists()
    limit = min(capacity := engine.manifest.grid.capacity, config.prompt_tokens or capacity)
    chat_refusal: str | None = NO_TEMPLATE
    channels = None
    if has_tokenizer:
        channels, chat_refusal = _probe_chats(engine.target, engine.tokenizer)
    default = 1.0 if _can_sample(engine) else 0.0
    if config.temperature and not _can_sample(engine):
        raise BadInput(
            f"the default temperature is {config.temperature:g}, and the bundle has greedy executables only: set it to "
            "0, or build with --sampling greedy,sample"
        )
    return ServedModel(
        engine=engine,
        name=name,
        temperature=default if config.temperature is None else config.temperature,
        max_prompt_tokens=limit,
        max_prompt_characters=MAX_NORMALIZED_CHARACTERS * limit * engine.tokenizer.max_token_chars
        if has_tokenizer
        else 0,
        chat_refusal=chat_refusal,
        tool_family=None if chat_refusal else _find_tool_family(engine.target),
        channels=channels,
        token_formatter=TokenFormatter(engine.tokenizer if has_tokenizer else None),
        fingerprint=_make_fingerprint(engine),
        registry=engine.metrics(name),
    )


def _make_fingerprint(engine: Engine) -> str:
    content = encode_manifest(engine.manifest) + engine.weights.encode()
    return f"fp_{hashlib.sha256(content).hexdigest()[:12]}"


def _probe_chats(target: Path, tokenizer: Tokenizer) -> tuple[Channels | None, str | None]:
    """Loads the template engine and compiles the template.

    Returns the channels that the template writes, and why chats cannot be served, if they cannot.
    """
    channels = None
    try:
        template = read_chat_template(target)
        if template is None:
            return None, NO_TEMPLATE
        try:
            with suppress(BadCheckpoint):  # tools are refused then
                template += read_chat_template(target, tools=True) or ""
            channels = find_channels(template, tokenizer.added_tokens)
        except BadInput as error:
            logger.error("chats are refused: %s", error)
            return None, str(error)
        render_chat(target, PROBE)
    except BadCheckpoint as error:
        logger.error("chats are refused: %s", error)
        # Clients do not learn paths.
        return None, str(error).replace(f"{target}/", "").replace(str(target), "the checkpoint")
    except BadInput as reason:  # the template refuses this message
        logger.debug("%s", reason)
    return channels, None


def _find_tool_family(target: Path) -> ToolFamily | None:
    """How the model writes calls; None if its template knows no tools, or fails at them."""
    try:
        family = find_tool_family(read_chat_template(target, tools=True) or "")
        if family:
            render_chat(target, PROBE, tools=[PROBE_TOOL])
        return family
    except BadCheckpoint as error:
        logger.error("tools are refused: %s", error)
    except BadInput as reason:
        logger.debug("%s", reason)
        return family
    return None


def _choose_name(config: ServingConfig, engine: Engine) -> str:
    """The name for clients. Of a directory only the last part, because clients must not see paths.

    A reference is text from a manifest, and the name appears in metrics, on the page and in responses.
    """
    reference = engine.manifest.target.reference if config.target is None else config.target
    place = Path(reference).expanduser()
    return config.name or escape_line(place.resolve().name if place.is_dir() else reference)


def _can_sample(engine: Engine) -> bool:
    return needs_sampling_state(engine.manifest.sampling)


# -- server state: loading, ready, draining, failed, or stalled, as the watchdog of the device finds

Status = Literal["loading", "ready", "draining", "stalled", "failed"]


@dataclass
class ServerState:
    """The state of one server. Created before the model is opened, so that /health answers meanwhile."""

    config: ServingConfig
    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: ApiKeys = field(default_factory=ApiKeys)
    phase: str = "start"  # of opening the model
    draining: bool = False  # whether new requests are refused
    ended: str | None = None  # why the engine had ended by itself when draining began
    started: float = field(default_factory=time.time)
    opened: ServedModel | None = None  # also while draining or failed
    watchdog: Watchdog = field(default_factory=Watchdog)

    def open(self, on_phase: Callable[[str], None] = lambda _: None) -> None:
        """Opens the model; to be called in another thread. Raises what `Engine.open` raises."""

        def follow(phase: str) -> None:
            self.phase = phase
            on_phase(phase)

        self.opened = open_model(self.config, follow)

    def close(self) -> None:
        """Refuses new requests, waits up to `drain_seconds` for open requests, returns when the engine has ended."""
        self.drain()
        if self.opened:
            self.opened.engine.close(drain_seconds=self.limits.drain_seconds)

    def drain(self) -> None:
        """Refuses new requests from now on."""
        if not self.draining:
            self.ended = self.failure
            self.draining = True

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        if self.opened is None:
            return "loading"
        return (
            "stalled"
            if self.watchdog.is_stalled(self.opened.engine.stats(), time.monotonic())
            else "ready"
        )

    @property
    def failure(self) -> str | None:
        """Why the engine ended by itself; None while it serves, or where `close` ended it."""
        if self.draining:
            return self.ended
        return self.opened.engine.failure if self.opened else None

    @property
    def model(self) -> ServedModel:
        """The model, while it serves. Raises ApiError otherwise."""
        if self.failure is not None:
            raise ApiError(
                503, "the engine has failed, and this server is about to exit", "failed", retry=True
            )
        if self.draining:
            raise shutting_down()
        if self.opened is None:
            raise ApiError(
                503,
                f"the server is starting ({self.phase}). Try again later",
                "loading",
                retry=True,
            )
        return self.opened
