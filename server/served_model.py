"""What is served: an opened engine with its name, its texts and what requests get that do not say."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.locations import is_url
from dflash_aot.cache.remote.fetch import locate_bundle
from dflash_aot.runtime.engine import MAX_WAITING, Engine
from dflash_aot.runtime.text.chat_template import read_chat_template, render_chat
from dflash_aot.server.token_formatting import Speller

logger = logging.getLogger(__name__)
SHORTENING = 4  # times at most that normalizers make a text shorter: NFC joins up to so many characters


@dataclass(frozen=True)
class Serving:
    """What is to be served, see `Engine.open`. name: of the model, by default the target's as the bundle has it.

    temperature: of requests that say none; None: 1 as OpenAI has it, 0 where the bundle cannot sample. prompt_tokens:
    of one prompt at most; None: what the grid holds.
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
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Model:
    """chats: whether the target has a template for them. fingerprint: of what was built; another one may give other
    texts to the same request. registry: the engine's metrics. most_characters: a longer text is no prompt of
    `most_prompt_tokens`, whatever its tokens."""

    engine: Engine
    name: str
    temperature: float
    most_prompt_tokens: int
    most_characters: int
    chats: bool
    speller: Speller
    fingerprint: str
    registry: CollectorRegistry

    @property
    def capacity(self) -> int:
        """Positions of a slot: prompt and answer, but for the last token."""
        return self.engine.manifest.grid.capacity

    @property
    def ks(self) -> Sequence[int]:
        """What may be verified per round."""
        return [k for k in self.engine.manifest.grid.k if k <= self.engine.k]

    @property
    def samples(self) -> bool:
        return _samples(self.engine)

    def describe(self) -> Mapping[str, Any]:
        """What was built, for /v1/models."""
        manifest = self.engine.manifest
        return {
            "k": self.ks,
            "block": manifest.draft.facts.block,
            "batch": manifest.grid.batch,
            "sampling": manifest.sampling,
            "temperature": self.temperature,
            "chat": self.chats,
        }


def open_model(serving: Serving, on_phase: Callable[[str], None]) -> Model:
    """Takes long; `on_phase` is told what begins. Raises what `Engine.open` raises."""
    if is_url(serving.bundle):
        on_phase("fetch")
    bundle = locate_bundle(serving.bundle, serving.require_signature)
    select_jax_platforms(read_manifest(bundle, serving.require_signature).environment.platform)
    engine = Engine.open(
        bundle,
        serving.target,
        serving.draft,
        k=serving.k,
        max_waiting=serving.max_waiting,
        require_signature=serving.require_signature,
        preload=serving.preload,
        on_phase=on_phase,
    )
    try:
        on_phase("tokenizer")
        return _describe_model(serving, engine)
    except BaseException:
        engine.close()
        raise


def _describe_model(serving: Serving, engine: Engine) -> Model:
    """Reads what the first request would wait for. Raises BadCheckpoint, BadInput."""
    name, speaks = _choose_name(serving, engine), (engine.target / "tokenizer.json").exists()
    most = min(capacity := engine.manifest.grid.capacity, serving.prompt_tokens or capacity)
    chats = speaks and read_chat_template(engine.target) is not None
    if chats:
        _render_once(engine.target)
    default = 1.0 if _samples(engine) else 0.0
    if serving.temperature and not _samples(engine):
        raise BadInput(
            f"requests are to have a temperature of {serving.temperature:g} by default, and the bundle has greedy "
            "executables only: let it be 0, or build with --sampling greedy,sample"
        )
    return Model(
        engine=engine,
        name=name,
        temperature=default if serving.temperature is None else serving.temperature,
        most_prompt_tokens=most,
        most_characters=SHORTENING * most * engine.tokenizer.max_token_chars if speaks else 0,
        chats=chats,
        speller=Speller(engine.tokenizer if speaks else None),
        fingerprint=f"fp_{hashlib.sha256(encode_manifest(engine.manifest)).hexdigest()[:12]}",
        registry=engine.metrics(name),
    )


def _render_once(target: Path) -> None:
    """What it takes stays loaded. Raises BadCheckpoint for a template that is broken."""
    try:
        render_chat(target, [{"role": "user", "content": "a"}])
    except BadCheckpoint:
        raise
    except BadInput as reason:  # the template wants other messages than this one
        logger.debug("%s", reason)


def _choose_name(serving: Serving, engine: Engine) -> str:
    """A directory is known by its own name alone: where it lies is nobody's business."""
    reference = engine.manifest.target.reference if serving.target is None else serving.target
    place = Path(reference).expanduser()
    return serving.name or (place.resolve().name if place.is_dir() else reference)


def _samples(engine: Engine) -> bool:
    return "sample" in engine.manifest.sampling
