"""From a body to what the engine is asked: prompts as token ids, and one set of parameters for each choice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.runtime.requests.sampling_params import PARAMETERS, SEEDS, SamplingParams
from dflash_aot.runtime.text.chat_template import TemplateVariables, render_chat
from dflash_aot.server.api_errors import Problem
from dflash_aot.server.limits import MAX_CHOICES
from dflash_aot.server.request_schema import ChatRequest, CompletionRequest, Message, SampledRequest
from dflash_aot.server.served_model import Model

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
    """How many a body asks for, before anything is tokenized. Raises Problem."""
    prompts, n = len(_list_prompts(body.prompt)) if isinstance(body, CompletionRequest) else 1, body.n or 1
    if prompts * n > MAX_CHOICES:
        words = f"{prompts} prompts, n = {n}: no more than {MAX_CHOICES} choices at once"
        raise Problem(400, words, "invalid_value", "n")
    return prompts * n


def read_completion(model: Model, body: CompletionRequest) -> Asking:
    """Tokenizes: not for an event loop. Raises Problem, BadInput."""
    check_name(model, body.model)
    prompts = tuple(tuple(_encode(model, one)) for one in _list_prompts(body.prompt))
    room = _find_room(model, prompts)
    wanted = min(COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
    _check_room(model, room, wanted)
    return Asking(prompts, body.n or 1, _make_params(model, body, wanted, body.logprobs))


def read_chat(model: Model, body: ChatRequest) -> Asking:
    """Renders and tokenizes: not for an event loop. Raises Problem, BadInput."""
    check_name(model, body.model)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise Problem(400, "max_tokens and max_completion_tokens differ: give one", "invalid_value", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs without logprobs: set it to true", "invalid_value", "top_logprobs")
    prompt = _render(model, body.messages, body.chat_template_kwargs or {})
    room = _find_room(model, [prompt])
    wanted = room if (asked := body.max_completion_tokens or body.max_tokens) is None else asked
    _check_room(model, room, wanted)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Asking((prompt,), body.n or 1, _make_params(model, body, wanted, logprobs))


def check_name(model: Model, name: str | None) -> None:
    """Raises Problem for another one's."""
    if name not in (None, model.name):
        raise Problem(404, f"this server has the model {model.name!r}, not {name!r}", "model_not_found", "model")


def _list_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    several = not isinstance(prompt, str) and not isinstance(prompt[0], int)
    return list(prompt) if several else [prompt]  # type: ignore[arg-type,list-item]


def _encode(model: Model, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        tokenizer = model.engine.tokenizer
        _check_characters(model, len(prompt), "prompt")
        return tokenizer.encode(prompt)
    except BadCheckpoint as error:
        raise Problem(400, "this model has no tokenizer here: give token ids", "no_tokenizer", "prompt") from error


def _render(model: Model, messages: Sequence[Message], variables: TemplateVariables) -> tuple[int, ...]:
    if not model.chats:
        raise Problem(400, "this model has no chat template: ask /v1/completions", "no_chat_template", "messages")
    engine, told = model.engine, [_describe_message(message) for message in messages]
    texts = (*(one["content"] for one in told), *map(str, variables.values()))
    _check_characters(model, sum(map(len, texts)), "messages")
    text = render_chat(engine.target, told, variables)
    # The template has written all special tokens itself.
    return tuple(engine.tokenizer.encode(text, add_special_tokens=False))


def _check_characters(model: Model, count: int, field: str) -> None:
    """Before they are tokenized, which takes its time. Raises Problem."""
    if count > model.most_characters:
        raise Problem(
            400,
            f"{count} characters are more than {model.most_prompt_tokens} tokens, as many as this server takes",
            "context_length_exceeded",
            field,
        )


def _describe_message(message: Message) -> dict[str, str]:
    """As templates expect it."""
    content = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": NEWER_ROLES.get(message.role, message.role), "content": content, **named}


def _find_room(model: Model, prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens there is room for behind the longest. Raises Problem."""
    longest, most = max(map(len, prompts)), model.most_prompt_tokens
    if not min(map(len, prompts)):
        raise Problem(400, "the prompt is empty: at least one token is needed", "invalid_value", "prompt")
    if longest > most:
        raise Problem(
            400, f"the prompt has {longest} tokens; this server takes up to {most}", "context_length_exceeded", "prompt"
        )
    return model.capacity + 1 - longest


def _check_room(model: Model, room: int, max_tokens: int) -> None:
    """Raises Problem."""
    if max_tokens > room:
        longest = model.capacity + 1 - room
        raise Problem(
            400,
            f"the prompt has {longest} tokens, and max_tokens is {max_tokens}: there is room for {room} behind it "
            f"({model.capacity} positions)",
            "context_length_exceeded",
            "max_tokens",
        )


def _make_params(model: Model, body: SampledRequest, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Raises BadInput, and Problem for what was not precompiled."""
    given = {name: value for name in PARAMETERS if (value := getattr(body, name)) is not None}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    if body.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    params = SamplingParams(
        **{"temperature": model.temperature, **given, "max_tokens": max_tokens, "logprobs": logprobs}
    )
    _check_built(model, params)
    return params


def _check_built(model: Model, params: SamplingParams) -> None:
    """What was not precompiled is refused here, without the command, which is the operator's. Raises Problem."""
    if params.shaped_by and not model.samples:
        asked = ", ".join(params.shaped_by)
        raise Problem(
            400, f"this server decodes greedily only, and this takes more: {asked}", "not_built", asked.split(",")[0]
        )
    if params.k not in (None, *model.ks):
        raise Problem(400, f"k is {params.k}: this server has {', '.join(map(str, model.ks))}", "not_built", "k")


def _seed(params: SamplingParams, choice: int) -> SamplingParams:
    if not choice or params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice + SEEDS) % (2 * SEEDS) - SEEDS)
