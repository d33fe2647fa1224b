"""The request builder: checks and tokenizes what a caller asks, and makes a request that the engine loop can serve."""

import logging
import math
import re
import reprlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import BadInput, DflashError, GridMiss
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.sampling_state import (
    SamplingKind,
    SamplingMode,
    check_sampling_kinds,
    find_serving_mode,
)
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle
from dflash_aot.runtime.requests.request import Delta, Request, RequestProgress
from dflash_aot.runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dflash_aot.runtime.structured_output.grammar import GrammarCache
    from dflash_aot.runtime.structured_output.grammar_matcher import GrammarMatcher
    from dflash_aot.runtime.text.detokenizer import Detokenizer
    from dflash_aot.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# -- refusals of requests outside the grid of a bundle, each with the command that builds what is missing
#
# A build adds to the bundle, so every command names the bundle and its pair, and can be pasted as it stands.

EXECUTABLES: Mapping[SamplingKind, str] = {
    "greedy": "greedy",
    "sample": "sampled",
    "constrain": "constrained",
    "prompt_logprobs": "scoring",
}


def refuse_length(manifest: Manifest, bundle: Path, length: int) -> GridMiss:
    """The error for too many positions; it names a wider grid where the models allow it."""
    positions, model = min(
        (manifest.target.facts.decoder.reach, "target"),
        (manifest.draft.facts.decoder.reach, "draft"),
        key=lambda found: found[0],
    )
    if length <= positions:
        return manifest.grid.miss(1, length, 0, lambda grid: _build_command(manifest, bundle, grid))
    return GridMiss(
        f"prompt and answer take {length} positions; the {model}'s config.json allows {positions} "
        f"(max_position_embeddings), and the grid ends at {manifest.grid.capacity}"
    )


def refuse_ks(manifest: Manifest, bundle: Path, ks: Sequence[int]) -> GridMiss:
    """The error for Ks that were not built; it names a wider grid where draft and grid allow them."""
    grid = manifest.grid
    most_verified = manifest.draft.facts.verified_block
    most = min(most_verified, grid.length[0]) - 1
    asked, there = (",".join(map(str, one)) for one in (ks, grid.k))
    missing = f"no executable verifies k={asked} tokens: the grid has k={there}"
    if max(ks) > most:
        return GridMiss(
            f"{missing}. More than k={most} cannot be added: a block has {most_verified} tokens, the "
            f"shortest length of the grid is {grid.length[0]}"
        )
    wider = msgspec.structs.replace(grid, k=tuple(sorted({*grid.k, *ks})))
    return GridMiss(f"{missing}. Precompile it: {_build_command(manifest, bundle, wider)}")


def refuse_sampling(
    manifest: Manifest, bundle: Path, kind: SamplingKind, fields: Sequence[str]
) -> GridMiss:
    """The error for parameters that need executables of a kind that the bundle lacks."""
    wider = check_sampling_kinds((*manifest.sampling, kind), "sampling")
    command = msgspec.structs.replace(manifest, sampling=wider).build_command(bundle)
    there = " and ".join(EXECUTABLES[one] for one in manifest.sampling)
    return GridMiss(
        f"the bundle has only {there} executables, and this request needs {EXECUTABLES[kind]} executables: "
        f"{', '.join(fields)}. Precompile them: {command}"
    )


def _build_command(manifest: Manifest, bundle: Path, grid: Grid) -> str:
    return msgspec.structs.replace(manifest, grid=grid).build_command(bundle)


# -- the request builder


Prompt = str | Sequence[int]
MAX_DEADLINE_SECONDS = 1e9


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of the engine's methods: how a request is queued.

    Attributes:
        priority: lower is served earlier, 0 by default. A running request loses its slot to
            another request only for lack of kv pages.
        deadline: seconds from now, after which the request ends as "cancelled" with the tokens it
            has; None for no deadline.
        wait: whether to wait for a place in a full queue: False (the default, except for
            `generate_all`), True, or seconds.
        grammar: of `structured_outputs`, as `Engine.compile_grammar` returns it; None (the
            default) compiles it.
        markers: token id → the lone surrogate that stands for the token in the answer's text, where the token would
            have no text or a text that other tokens can write; none by default.
    """

    priority: int
    deadline: float | None
    wait: bool | float
    grammar: "GrammarMatcher | None"
    markers: Mapping[int, str]


def check_options(options: RequestOptions) -> RequestOptions:
    """The options, completed by defaults. Raises BadInput; TypeError for an unknown name."""
    if unknown := options.keys() - RequestOptions.__annotations__.keys():
        known = ", ".join(RequestOptions.__annotations__)
        raise TypeError(
            f"unknown keyword argument {', '.join(sorted(unknown))}: the options are {known}"
        )
    priority = options.get("priority", 0)
    deadline = options.get("deadline")
    wait = options.get("wait", False)
    if type(priority) is not int:
        raise BadInput(f"priority is {priority!r}: a whole number is needed, lower for earlier")
    is_number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
    if deadline is not None and not (is_number and 0 < deadline <= MAX_DEADLINE_SECONDS):
        raise BadInput(
            f"deadline is {reprlib.repr(deadline)}: seconds from now are needed, above 0 to {MAX_DEADLINE_SECONDS:g}"
        )
    if not isinstance(wait, bool | int | float) or wait < 0 or wait != wait:
        raise BadInput(f"wait is {wait!r}: True, False or seconds are needed")
    grammar = options.get("grammar")
    if grammar is not None:
        from dflash_aot.runtime.structured_output.grammar_matcher import GrammarMatcher  # noqa: PLC0415  loads llguidance

        if not isinstance(grammar, GrammarMatcher):
            raise BadInput(
                f"grammar is {reprlib.repr(grammar)}: what Engine.compile_grammar returns is needed"
            )
    markers = options.get("markers", {})
    texts = [*markers.values()] if isinstance(markers, Mapping) else [markers]
    if not all(isinstance(text, str) and re.fullmatch("[\ud800-\udfff]", text) for text in texts):
        raise BadInput(
            f"markers is {reprlib.repr(markers)}: lone surrogates by token id are needed"
        )
    return RequestOptions(
        priority=priority, deadline=deadline, wait=wait, grammar=grammar, markers=markers
    )


DEFAULT_OPTIONS = check_options({})


def find_wait_seconds(options: RequestOptions, request: Request) -> float | None:
    """Seconds to wait for a place in the queue, at most until the request's deadline; None for no limit."""
    limits = [] if options["wait"] is True else [options["wait"]]
    limits += [] if request.deadline is None else [request.deadline - time.monotonic()]
    seconds = min(limits, default=math.inf)
    return None if seconds > threading.TIMEOUT_MAX else max(seconds, 0.0)


class RequestBuilder:
    """Makes requests for the executables of a bundle. Threads may share it."""

    def __init__(self, bundle: LoadedBundle, target: Path, default_stop_token_ids: frozenset[int]):
        """target: the checkpoint directory, for its tokenizer. default_stop_token_ids: of requests that name none."""
        self._bundle = bundle
        self._target = target
        self._has_tokenizer = (target / "tokenizer.json").exists()
        self.default_stop_token_ids = default_stop_token_ids
        self._prepared = False
        self._tokenizer: Tokenizer | None = None
        self._grammars: GrammarCache | None = None
        self._no_grammars: tuple[str, ...] = ()  # why no compiler can be made
        self._tokenizer_lock = threading.Lock()
        self._grammars_lock = threading.Lock()

    @property
    def tokenizer(self) -> "Tokenizer":
        """The target's tokenizer, loaded at its first use. Raises BadCheckpoint."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                from dflash_aot.runtime.text.tokenizer import Tokenizer  # noqa: PLC0415  token ids need no text layer

                self._tokenizer = Tokenizer.open(self._target)
            return self._tokenizer

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams,
        emit: Callable[[Delta], None],
        on_cancel: Callable[[], None],
        options: RequestOptions,
        submitted: float,
    ) -> Request:
        """A checked request. options: as `check_options` returns them. submitted: a monotonic time.

        Raises BadInput, BadCheckpoint, GridMiss.
        """
        params = _copy_params(params)
        ids = self._read_prompt(prompt)
        self._check_tokens(ids, params)
        self._check_executables(params)
        deadline = options["deadline"]
        limit = self._find_limit(len(ids), params)
        return Request(
            prompt=ids,
            params=params,
            limit=limit,
            stop_token_ids=choose_stop_token_ids(params, self.default_stop_token_ids),
            detokenizer=self._make_detokenizer(prompt, ids, params, options["markers"]),
            emit=emit,
            submitted=submitted,
            priority=options["priority"],
            deadline=None if deadline is None else submitted + deadline,
            progress=RequestProgress(on_cancel=on_cancel),
            matcher=self._find_matcher(params, options["grammar"], limit),
        )

    def _find_matcher(
        self, params: SamplingParams, compiled: "GrammarMatcher | None", limit: int
    ) -> "GrammarMatcher | None":
        if params.structured_outputs is not None:
            return self._follow(params.structured_outputs, compiled, limit)
        if compiled is not None:
            raise BadInput("grammar is given without structured_outputs: give both")
        return None

    def _follow(
        self, asked: Mapping[str, Any], compiled: "GrammarMatcher | None", limit: int
    ) -> "GrammarMatcher":
        """The matcher of a grammar. Raises BadInput also where every answer is provably longer than the limit."""
        if compiled is not None and not self.grammars.has_made(compiled):
            raise BadInput("grammar was compiled by another engine: compile it with this one")
        matcher = self.grammars.compile(asked) if compiled is None else compiled.copy()
        if limit and matcher.shortest is not None and matcher.needs_more(limit):
            raise BadInput(
                f"structured_outputs: the shortest answer found for this form has {len(matcher.shortest)} tokens, and "
                f"max_tokens allows {limit}"
            )
        return matcher

    @property
    def grammars(self) -> "GrammarCache":
        """The compiler of grammars, made at its first use. Raises BadCheckpoint; BadInput for another tokenizer.

        For 151,000 tokens that takes about a second, in which llguidance holds the GIL: an engine whose bundle follows
        grammars makes it before requests come, see `prepare`.
        """
        tokenizer = self.tokenizer
        with self._grammars_lock:
            if self._no_grammars:
                raise BadInput(*self._no_grammars)
            if self._grammars is None:
                from dflash_aot.runtime.structured_output.grammar import GrammarCache  # noqa: PLC0415  see above

                vocab = self._bundle.manifest.target.facts.decoder.vocab
                try:
                    self._grammars = GrammarCache(tokenizer, vocab, self.default_stop_token_ids)
                except BadInput as error:
                    self._no_grammars = error.args
                    raise
            return self._grammars

    def prepare(self, starts_guard: bool = False) -> bool:
        """Makes what the first requests would wait for. Returns whether there was something to make.

        starts_guard: whether to start the process that checks grammars.

        An error is only logged: the first request that needs a grammar raises it again.
        """
        follows = "constrain" in self._bundle.manifest.sampling and self._has_tokenizer
        if not follows or self._prepared:
            return False
        try:
            grammars = self.grammars
            if starts_guard:
                grammars.prepare()
        except (DflashError, MemoryError) as error:
            logger.error("no grammars can be compiled: %s", error)
        self._prepared = True
        return True

    def _read_prompt(self, prompt: Prompt) -> list[int]:
        # Bytes are a sequence of numbers too, but not of token ids.
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise BadInput(
                f"the prompt is {reprlib.repr(prompt)}: a text or a list of token ids is needed"
            )
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise BadInput("the prompt is empty: at least one token is needed to continue from")
        return ids

    def _check_tokens(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raises BadInput for anything that is not a token of the target."""
        vocab = self._bundle.manifest.target.facts.decoder.vocab
        named = {
            "the prompt": ids,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
        }
        for what, tokens in named.items():
            for token in tokens or ():
                if type(token) is not int or not 0 <= token < vocab:
                    raise BadInput(
                        f"{what} holds {token!r}: the target's tokens are 0 to {vocab - 1}"
                    )

    def _check_executables(self, params: SamplingParams) -> None:
        """Raises GridMiss for what was not precompiled, BadInput for what was not loaded."""
        bundle = self._bundle
        manifest = self._bundle.manifest
        if params.prompt_logprobs is not None and "prompt_logprobs" not in manifest.sampling:
            raise refuse_sampling(manifest, bundle.path, "prompt_logprobs", ("prompt_logprobs",))
        asked: dict[SamplingMode, Sequence[str]] = {"sample": params.sampled_fields}
        masked = {
            "structured_outputs": params.structured_outputs is not None,
            "min_tokens": masks_min_tokens(params, self.default_stop_token_ids),
        }
        asked["constrain"] = tuple(name for name, is_needed in masked.items() if is_needed)
        for mode, names in asked.items():
            if names and find_serving_mode(mode, manifest.sampling) is None:
                raise refuse_sampling(manifest, bundle.path, mode, names)
        if params.k is not None and params.k not in manifest.grid.k:
            raise refuse_ks(manifest, bundle.path, [params.k])
        if params.k is not None and params.k > bundle.k:
            raise BadInput(
                f"k is {params.k}, but the engine was opened for K up to {bundle.k}: open it with k='auto'"
            )

    def _find_limit(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens that a request may get. Its last token needs no kv, so it may lie one position past the capacity."""
        grid = self._bundle.manifest.grid
        wanted = params.max_tokens
        room = grid.capacity + 1 - prompt_tokens
        least = max(wanted or 1, params.min_tokens)
        if least > room:
            raise refuse_length(self._bundle.manifest, self._bundle.path, prompt_tokens + least - 1)
        return room if wanted is None else wanted

    def _make_detokenizer(
        self,
        prompt: Prompt,
        ids: Sequence[int],
        params: SamplingParams,
        markers: Mapping[int, str],
    ) -> "Detokenizer | None":
        """A detokenizer; None where the prompt is token ids and the checkpoint has no tokenizer."""
        if not isinstance(prompt, str) and not params.stop and not self._has_tokenizer:
            return None
        if not isinstance(prompt, str) and not self._has_tokenizer:
            raise BadInput(
                "stop texts need the target's tokenizer.json, which is missing: use stop_token_ids"
            )
        tokenizer = self.tokenizer
        from dflash_aot.runtime.text.detokenizer import Detokenizer  # noqa: PLC0415  see `tokenizer`

        return Detokenizer(tokenizer, params.stop, ids, params.min_tokens, markers)


def choose_stop_token_ids(params: SamplingParams, defaults: frozenset[int]) -> frozenset[int]:
    """The tokens that end the answer. defaults: the target's."""
    if params.stop_token_ids is not None:
        return frozenset(params.stop_token_ids)
    return frozenset() if params.ignore_eos else defaults


def masks_min_tokens(params: SamplingParams, defaults: frozenset[int]) -> bool:
    """Whether `min_tokens` needs masks: a token could end the answer too early. defaults: the target's end tokens."""
    return params.min_tokens > 0 and bool(choose_stop_token_ids(params, defaults))


def _copy_params(params: SamplingParams) -> SamplingParams:
    """A checked copy: the caller may change its mapping while the request is served. Raises BadInput."""
    if not isinstance(params, SamplingParams):
        raise BadInput(f"params is {reprlib.repr(params)}: SamplingParams are needed")
    return replace(params, logit_bias=dict(params.logit_bias)) if params.logit_bias else params
