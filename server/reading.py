"""From a body to what the engine is asked: prompts as token ids, and one set of parameters for each choice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.runtime.chat import render_chat
from dflash_aot.runtime.sampling_params import SEEDS, SamplingParams
from dflash_aot.server.asked import ChatRequest, CompletionRequest, Message, Sampled
from dflash_aot.server.limits import MOST_CHOICES
from dflash_aot.server.problems import Problem
from dflash_aot.server.service import Service

COMPLETION_TOKENS = 16  # OpenAI's default of completions
NEWER_ROLES = {"developer": "system"}  # which templates do not know


@dataclass(frozen=True)
class Asking:
    """One request: `prompts` of token ids, `n` choices of each, all by `params` but for their seeds."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    params: SamplingParams

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def each(self) -> Iterator[tuple[Sequence[int], SamplingParams]]:
        """In the order of their indices: all choices of the first prompt come first."""
        for prompt in self.prompts:
            for choice in range(self.n):
                yield prompt, _seed(self.params, choice)


def count_choices(body: CompletionRequest | ChatRequest) -> int:
    """How many a body asks for, before anything is tokenized."""
    prompts = body.prompt if isinstance(body, CompletionRequest) else None
    several = isinstance(prompts, list) and not isinstance(prompts[0], int)
    return (len(prompts) if prompts and several else 1) * (body.n or 1)


def read_completion(service: Service, body: CompletionRequest) -> Asking:
    """Tokenizes: not for an event loop. Raises Problem, BadInput."""
    _check_model(service, body.model)
    prompts = _list_prompts(service, body.prompt)
    room = _check_prompts(service, prompts)
    wanted = min(COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
    return _ask(service, body, prompts, wanted, body.logprobs)


def read_chat(service: Service, body: ChatRequest) -> Asking:
    """Renders and tokenizes: not for an event loop. Raises Problem, BadInput."""
    _check_model(service, body.model)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise Problem(400, "max_tokens and max_completion_tokens differ: give one", "invalid_value", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs without logprobs: set it to true", "invalid_value", "top_logprobs")
    prompts = (_render(service, body.messages),)
    room = _check_prompts(service, prompts)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _ask(
        service, body, prompts, room if wanted is None else wanted, (body.top_logprobs or 0) if body.logprobs else None
    )


def _check_model(service: Service, model: str | None) -> None:
    if model not in (None, service.name):
        raise Problem(404, f"this server has the model {service.name!r}, not {model!r}", "model_not_found", "model")


def _list_prompts(
    service: Service, prompt: str | list[str] | list[int] | list[list[int]]
) -> tuple[tuple[int, ...], ...]:
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    return tuple(tuple(_encode(service, one) if isinstance(one, str) else one) for one in several)


def _encode(service: Service, text: str) -> list[int]:
    try:
        return service.engine.tokenizer.encode(text)
    except BadCheckpoint as error:
        raise Problem(400, "this model has no tokenizer here: give token ids", "no_tokenizer", "prompt") from error


def _render(service: Service, messages: Sequence[Message]) -> tuple[int, ...]:
    if not service.chats:
        raise Problem(400, "this model has no chat template: ask /v1/completions", "no_chat_template", "messages")
    engine = service.engine
    text = render_chat(engine.target, [_describe_message(message) for message in messages])
    # The template has written all special tokens itself.
    return tuple(engine.tokenizer.encode(text, add_special_tokens=False))


def _describe_message(message: Message) -> dict[str, str]:
    """As templates expect it."""
    content = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": NEWER_ROLES.get(message.role, message.role), "content": content, **named}


def _check_prompts(service: Service, prompts: Sequence[Sequence[int]]) -> int:
    """Returns how many tokens there is room for behind the longest. Raises Problem."""
    longest, most = max(map(len, prompts)), service.most_prompt_tokens
    if not min(map(len, prompts)):
        raise Problem(400, "the prompt is empty: at least one token is needed", "invalid_value", "prompt")
    if longest > most:
        raise Problem(
            400, f"the prompt has {longest} tokens; this server takes up to {most}", "context_length_exceeded", "prompt"
        )
    return service.engine.manifest.grid.capacity + 1 - longest


def _ask(
    service: Service, body: Sampled, prompts: tuple[tuple[int, ...], ...], max_tokens: int, logprobs: int | None
) -> Asking:
    n = 1 if body.n is None else body.n
    if len(prompts) * n > MOST_CHOICES:
        raise Problem(
            400, f"{len(prompts)} prompts, n = {n}: no more than {MOST_CHOICES} choices at once", "invalid_value", "n"
        )
    room = _check_prompts(service, prompts)
    if max_tokens > room:
        raise Problem(
            400,
            f"the prompt has {max(map(len, prompts))} tokens, and max_tokens is {max_tokens}: there is room for {room} "
            f"behind it ({service.engine.manifest.grid.capacity} positions)",
            "context_length_exceeded",
            "max_tokens",
        )
    params = _make_params(service, body, max_tokens, logprobs)
    _check_built(service, params)
    return Asking(prompts, n, params)


def _make_params(service: Service, body: Sampled, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Raises BadInput."""
    given = {
        name: value
        for name in (
            *("top_p", "seed", "presence_penalty", "frequency_penalty"),
            *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "k", "trace"),
        )
        if (value := getattr(body, name)) is not None
    }
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=service.temperature if body.temperature is None else body.temperature,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        logit_bias=bias or None,
        logprobs=logprobs,
        **given,
    )


def _check_built(service: Service, params: SamplingParams) -> None:
    """What was not precompiled is refused here, without the command, which is the operator's. Raises Problem."""
    manifest = service.engine.manifest
    if params.shaped_by and not service.samples:
        asked = ", ".join(params.shaped_by)
        raise Problem(
            400, f"this server decodes greedily only, and this takes more: {asked}", "not_built", asked.split(",")[0]
        )
    ks = [k for k in manifest.grid.k if k <= service.engine.k]
    if params.k is not None and params.k not in ks:
        raise Problem(400, f"k is {params.k}: this server has {', '.join(map(str, ks))}", "not_built", "k")


def _seed(params: SamplingParams, choice: int) -> SamplingParams:
    if not choice or params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice + SEEDS) % (2 * SEEDS) - SEEDS)
