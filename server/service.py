"""One engine and those who use it: whether it serves, under which name, and how much each caller has under way."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from dflash_aot.cache.download import locate_bundle
from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.jax_platform import start_jax
from dflash_aot.cache.location import is_url
from dflash_aot.cache.manifest import encode_manifest, read_manifest
from dflash_aot.runtime.chat import has_template, render_chat
from dflash_aot.runtime.engine import MAX_WAITING, Engine
from dflash_aot.server.keys import Keys
from dflash_aot.server.limits import Limits
from dflash_aot.server.problems import Problem
from dflash_aot.server.spelling import Speller
from dflash_aot.server.stall import StallWatch

logger = logging.getLogger(__name__)
Status = Literal["loading", "ready", "draining", "stalled", "failed"]


@dataclass(frozen=True)
class Serving:
    """What is to be served, see `Engine.open`. name: of the model, by default the target's as the bundle has it.

    temperature: of requests that say none; None: 1 as OpenAI has it, 0 where the bundle cannot sample.
    """

    bundle: str
    target: str | None = None
    draft: str | None = None
    k: int | Literal["auto"] = "auto"
    max_waiting: int = MAX_WAITING
    require_signature: Path | None = None
    preload: bool = True
    name: str | None = None
    temperature: float | None = None


@dataclass
class Service:
    """Made before the engine, so that a health check can be answered while it is opened."""

    serving: Serving
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    phase: str = "start"
    draining: bool = False
    started: float = field(default_factory=time.time)
    _engine: Engine | None = None
    _chats: bool = False
    _registry: CollectorRegistry | None = None
    _fingerprint: str = ""
    _name: str = ""
    _speller: Speller = field(default_factory=Speller)
    _stall: StallWatch = field(default_factory=StallWatch)

    # -- the engine

    def open(self, on_phase: Callable[[str], None] = lambda _: None) -> None:
        """In a thread of its own. Raises what `Engine.open` raises."""
        serving, tell = self.serving, self._follow(on_phase)
        if is_url(serving.bundle):
            tell("fetch")
        bundle = locate_bundle(serving.bundle, serving.require_signature)
        start_jax(read_manifest(bundle, serving.require_signature).environment.platform)
        engine = Engine.open(
            bundle,
            serving.target,
            serving.draft,
            k=serving.k,
            max_waiting=serving.max_waiting,
            require_signature=serving.require_signature,
            preload=serving.preload,
            on_phase=tell,
        )
        try:
            tell("tokenizer")
            self._prepare_text(engine)
        except BaseException:
            engine.close()
            raise
        self._fingerprint = hashlib.sha256(encode_manifest(engine.manifest)).hexdigest()[:12]
        self._name = self._choose_name(engine)
        self._registry = engine.metrics(self._name)
        self._engine = engine

    def _follow(self, on_phase: Callable[[str], None]) -> Callable[[str], None]:
        def follow(phase: str) -> None:
            self.phase = phase
            on_phase(phase)

        return follow

    def _prepare_text(self, engine: Engine) -> None:
        """What the first request would wait for; a target without tokenizer or template serves what needs none.

        Raises BadCheckpoint for what is there and broken.
        """
        if not (engine.target / "tokenizer.json").exists():
            return
        self._speller = Speller(engine.tokenizer)
        self._chats = has_template(engine.target)
        if self._chats:
            try:
                render_chat(engine.target, [{"role": "user", "content": "a"}])
            except BadCheckpoint:
                raise
            except BadInput as reason:  # the template wants other messages than this one
                logger.debug("%s", reason)

    def _choose_name(self, engine: Engine) -> str:
        """A directory is known by its own name alone: where it lies is nobody's business."""
        reference = engine.manifest.target.reference if self.serving.target is None else self.serving.target
        place = Path(reference).expanduser()
        return self.serving.name or (place.resolve().name if place.is_dir() else reference)

    @property
    def engine(self) -> Engine:
        """Raises Problem while nothing can be asked of it."""
        if self.draining:
            raise Problem(503, "the server is shutting down. Ask another one, or later", "draining", retry=True)
        if self._engine is None:
            raise Problem(503, f"the server is starting ({self.phase}). Try again later", "loading", retry=True)
        if self._engine.failure is not None:
            raise Problem(503, "the engine has failed, and this server is about to end", "failed", retry=True)
        return self._engine

    @property
    def opened(self) -> Engine | None:
        """The engine, whatever its state."""
        return self._engine

    @property
    def chats(self) -> bool:
        """Whether the target has a template for them."""
        return self._chats

    @property
    def name(self) -> str:
        """Of the model, once it is opened."""
        return self._name

    @property
    def fingerprint(self) -> str:
        """Of what was built: another one may give other texts to the same request."""
        return f"fp_{self._fingerprint}"

    @property
    def speller(self) -> Speller:
        """Of the target's tokens, once it is opened."""
        return self._speller

    def describe(self) -> Mapping[str, Any]:
        """The model as /v1/models shows it."""
        manifest, k = self.engine.manifest, self.engine.k
        built = {
            "k": [one for one in manifest.grid.k if one <= k],
            "block": manifest.draft.facts.block,
            "batch": list(manifest.grid.batch),
            "sampling": list(manifest.sampling),
            "temperature": self.temperature,
            "chat": self._chats,
        }
        return {
            "id": self._name,
            "object": "model",
            "created": int(self.started),
            "owned_by": "dflash-aot",
            "max_model_len": manifest.grid.capacity,
            "dflash": built,
        }

    @property
    def registry(self) -> CollectorRegistry:
        """The engine's metrics. Raises Problem while it is opened."""
        if self._registry is None:
            raise Problem(503, "the server is starting", "loading", retry=True)
        return self._registry

    @property
    def samples(self) -> bool:
        return "sample" in self.engine.manifest.sampling

    @property
    def temperature(self) -> float:
        """Of requests that say none."""
        if self.serving.temperature is not None:
            return self.serving.temperature
        return 1.0 if self.samples else 0.0

    @property
    def most_prompt_tokens(self) -> int:
        capacity = self.engine.manifest.grid.capacity
        return min(capacity, self.limits.prompt_tokens or capacity)

    # -- health

    @property
    def status(self) -> Status:
        if self.draining:
            return "draining"
        if self._engine is None:
            return "loading"
        if self._engine.failure is not None:
            return "failed"
        return "stalled" if self._stall.is_stalled(self._engine.stats(), time.monotonic()) else "ready"
