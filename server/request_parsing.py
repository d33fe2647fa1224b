"""Request parsing: from the body of an HTTP request to token ids and sampling parameters of each choice."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.bounded_worker import Leaving
from dflash_aot.runtime.requests.request_builder import masks_min_tokens
from dflash_aot.runtime.requests.sampling_params import PARAMETERS, SEEDS, SamplingParams
from dflash_aot.runtime.structured_output.json_schema import check_schema, require_object
from dflash_aot.runtime.text.chat_template import TemplateVariables, render_chat
from dflash_aot.runtime.text.tokenizer import BREAK
from dflash_aot.server.api_errors import ApiError
from dflash_aot.server.chat_families import HERMES, IN_CHANNELS, Channels, OfferedTools
from dflash_aot.server.limits import MAX_CHOICES, MAX_PROMPT_SCORES
from dflash_aot.server.request_schema import (
    ChatRequest,
    ChosenTool,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    SampledRequest,
)
from dflash_aot.server.served_model import ServedModel
from dflash_aot.server.tool_grammars import write_call_grammar, write_channel_grammar
from dflash_aot.server.tool_parsers import AnswerParser, make_parser

if TYPE_CHECKING:
    from dflash_aot.runtime.structured_output.grammar_matcher import GrammarMatcher

Body = TypeVar("Body", CompletionRequest, ChatRequest)
COMPLETION_TOKENS = 16  # OpenAI's default for completions
CONTEXT_LENGTH = "This model's maximum context length is"  # by these words of OpenAI's, clients recognise an overflow
NEWER_ROLES = {"developer": "system"}  # chat templates know the older name


@dataclass(frozen=True)
class ParsedRequest:
    """A request for `n` choices of each prompt."""

    prompts: tuple[tuple[int, ...], ...]  # token ids
    n: int
    params: SamplingParams  # of the first choice; the others have other seeds
    echoes: tuple[str, ...] = ()  # the texts of the prompts, where answers begin with them
    # Of scored prompts, the places of the text's tokens; see `find_text_tokens`.
    echoed_tokens: tuple[range, ...] = ()
    tools: OfferedTools | None = None  # that the answer may call
    # The compiled `structured_outputs` of all choices.
    grammar: "GrammarMatcher | None" = None
    channels: Channels | None = None  # the markers that the answer may have
    opening: str = ""  # the part of the answer that the prompt already contains; see `make_parser`

    def make_parser(self) -> AnswerParser | None:
        """A parser of one choice; None where the whole answer is text."""
        family = self.channels.family if self.channels else None
        return make_parser(family, self.tools, self.opening)

    @property
    def choice_count(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def find_prompt(self, choice: int) -> int:
        """The index of the prompt that a choice continues."""
        return choice // self.n

    def list_choices(self) -> Iterator[tuple[Sequence[int], SamplingParams]]:
        """Prompt and parameters of every choice by its index: all choices of the first prompt come first."""
        for prompt in self.prompts:
            for choice in range(self.n):
                yield prompt, _with_seed(self.params, choice)


def count_choices(body: CompletionRequest | ChatRequest) -> int:
    """The number of choices of a request, before anything is tokenized. Raises ApiError if they are too many."""
    prompts = len(_list_prompts(body.prompt)) if isinstance(body, CompletionRequest) else 1
    n = body.n or 1
    if prompts * n > MAX_CHOICES:
        message = f"{prompts} prompts with n = {n}: no more than {MAX_CHOICES} choices are allowed"
        raise ApiError(400, message, "invalid_value", "n")
    return prompts * n


def parse_and_compile(
    parse: Callable[[ServedModel, Body], ParsedRequest],
    model: ServedModel,
    body: Body,
    key: int,
    leaving: Leaving,
) -> ParsedRequest:
    """The request of `parse` with its grammar, which may take seconds, until `leaving` ends them.

    key: the number of the API key. Raises what `parse` raises, BadInput.
    """
    request = parse(model, body)
    asked = request.params.structured_outputs
    if asked is None:
        return request
    return replace(request, grammar=model.engine.compile_grammar(asked, key, leaving))


def parse_completion(model: ServedModel, body: CompletionRequest) -> ParsedRequest:
    """Tokenizes the prompts; too slow for an event loop. Raises ApiError, BadInput."""
    check_model_name(model, body.model)
    prompts = tuple(tuple(_encode_prompt(model, prompt)) for prompt in _list_prompts(body.prompt))
    room = _count_free_positions(model, prompts)
    max_tokens = min(COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
    _check_room(model, room, max_tokens)
    params = _make_params(model, body, max_tokens, body.logprobs)
    if not body.echo:
        return check_scores(ParsedRequest(prompts, body.n or 1, params), "prompt_logprobs")
    places: tuple[range, ...] = ()
    if body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, params.prompt_logprobs or 0))
        _check_built(model, params)
        places = tuple(
            find_text_tokens(
                prompt,
                tuple(encode_text(model, given, False)) if isinstance(given, str) else prompt,
            )
            for given, prompt in zip(_list_prompts(body.prompt), prompts, strict=True)
        )
    echoes = tuple(
        given if isinstance(given, str) else model.token_formatter.join_texts(given)
        for given in _list_prompts(body.prompt)
    )
    return check_scores(ParsedRequest(prompts, body.n or 1, params, echoes, places), "logprobs")


def parse_chat(model: ServedModel, body: ChatRequest) -> ParsedRequest:
    """Renders and tokenizes the messages; too slow for an event loop. Raises ApiError, BadInput."""
    check_model_name(model, body.model)
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens differ: give one of the two",
            "invalid_value",
            "max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(
            400, "top_logprobs without logprobs: set it to true", "invalid_value", "top_logprobs"
        )
    offered = _choose_tools(model, body)
    forced = _write_forced_calls(model, body, offered) if offered else None
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if offered else []
    text = _render_text(model, body.messages, _choose_variables(model, body), tools)
    opening = ""
    has_form = bool(_read_output_form(body))
    if model.channels and (has_form or forced):
        # Grammars hold from the first token of the answer, so the prompt may not leave thinking open.
        added, opening = model.channels.family.leave_out_thinking(text, begins_text=has_form)
        text += added
    elif model.channels:
        opening = model.channels.family.find_opening(text)
    prompt = _encode_chat(model, text)
    room = _count_free_positions(model, [prompt], "messages")
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = room if given is None else given
    _check_room(model, room, max_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _make_params(model, body, max_tokens, logprobs, forced)
    request = ParsedRequest(
        (prompt,), body.n or 1, params, tools=offered, channels=model.channels, opening=opening
    )
    return check_scores(request, "prompt_logprobs")


def _choose_variables(model: ServedModel, body: ChatRequest) -> TemplateVariables:
    """The variables of the chat template. Raises ApiError for an effort that the model does not know."""
    given = body.chat_template_kwargs or {}
    efforts = model.channels.family.efforts if model.channels else ()
    effort = body.reasoning_effort
    if effort is None or not efforts:
        return given
    if effort not in efforts:
        message = f"reasoning_effort is {effort!r}: this model has {', '.join(efforts)}"
        raise ApiError(400, message, "invalid_value", "reasoning_effort")
    return {"reasoning_effort": effort, **given}


def check_model_name(model: ServedModel, name: str | None) -> None:
    """Raises ApiError unless `name` is the served model, or None."""
    if name not in (None, model.name):
        raise ApiError(
            404,
            f"this server has the model {model.name!r}, not {name!r}",
            "model_not_found",
            "model",
        )


def _list_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    several = not isinstance(prompt, str) and not isinstance(prompt[0], int)
    return list(prompt) if several else [prompt]  # type: ignore[arg-type,list-item]


def _encode_prompt(model: ServedModel, prompt: str | list[int]) -> list[int]:
    return encode_text(model, prompt) if isinstance(prompt, str) else prompt


def find_text_tokens(prompt: Sequence[int], text_tokens: Sequence[int]) -> range:
    """The places in a prompt of its text's tokens, without those that the tokenizer adds around the text.

    text_tokens: the tokens of the text alone. Returns all places if the prompt does not have them in a row.
    """
    count = len(text_tokens)
    starts = (
        start
        for start in range(len(prompt) - count + 1)
        if prompt[start : start + count] == text_tokens
    )
    first = next(starts, None)
    return range(len(prompt)) if first is None else range(first, first + count)


def check_scores(request: ParsedRequest, field: str) -> ParsedRequest:
    """Raises ApiError, which names `field`, for more log-probabilities of prompts than one answer may have."""
    tops = request.params.prompt_logprobs
    if (
        tops is not None
        and (count := request.prompt_tokens * request.n * (tops + 1)) > MAX_PROMPT_SCORES
    ):
        message = (
            f"{request.prompt_tokens} prompt tokens x n = {request.n} x ({tops} likeliest tokens + 1) are {count} "
            f"log-probabilities of prompts: no more than {MAX_PROMPT_SCORES} are allowed"
        )
        raise ApiError(400, message, "invalid_value", field)
    return request


def _choose_tools(model: ServedModel, body: ChatRequest) -> OfferedTools | None:
    """The tools that the answer may call; None for no tools. Raises ApiError for what cannot be done."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice without tools", "invalid_value", "tool_choice")
        return None
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools has a name twice", "invalid_value", "tools")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        raise ApiError(
            400, f"tools has no function {choice.function.name!r}", "invalid_value", "tool_choice"
        )
    if choice == "none":
        return None
    if model.tool_family is None and choice in (None, "auto"):
        message = (
            "the chat template of this model knows no tools, or writes calls in a form that is not read here: force a "
            "call by tool_choice, or leave tools out"
        )
        raise ApiError(400, message, "not_built", "tools")
    functions = {tool.function.name: tool.function.parameters or {} for tool in body.tools}
    has_call_markers = model.channels is not None and model.channels.family.calls is not None
    family = IN_CHANNELS if has_call_markers else model.tool_family or HERMES
    return OfferedTools(family, functions, body.parallel_tool_calls is not False)


def _write_forced_calls(model: ServedModel, body: ChatRequest, offered: OfferedTools) -> str | None:
    """The grammar of calls that must come; None where the model decides."""
    choice = body.tool_choice
    tools = body.tools or ()
    if choice in (None, "auto"):
        return None
    functions = {
        tool.function.name: require_object(tool.function.parameters or {})
        for tool in tools
        if not isinstance(choice, ChosenTool) or tool.function.name == choice.function.name
    }
    for at, tool in enumerate(tools):
        check_schema(tool.function.parameters or {}, f"tools.{at}.function.parameters")
    parallel = offered.parallel and not isinstance(choice, ChosenTool)
    if offered.family is IN_CHANNELS and model.channels:
        thinks = bool((body.chat_template_kwargs or {}).get("enable_thinking"))
        thinks = thinks or model.channels.family.always_thinks
        return write_channel_grammar(model.channels, functions, parallel, thinks)
    return write_call_grammar(offered.family, functions, parallel)


def encode_text(model: ServedModel, text: str, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a prompt; too slow for an event loop. Raises ApiError, BadInput."""
    tokenizer = model.require_tokenizer("prompt")
    _check_characters(model, len(text), "prompt")
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def render_messages(
    model: ServedModel, messages: Sequence[Message], variables: TemplateVariables
) -> tuple[int, ...]:
    """The tokens of a chat, as the target's template renders it. Raises ApiError, BadInput."""
    return _encode_chat(model, _render_text(model, messages, variables, ()))


def _encode_chat(model: ServedModel, text: str) -> tuple[int, ...]:
    # Each broken token is one or more, and takes time of its own.
    check_length(model, text.count(BREAK), "messages")
    # The template contains all special tokens.
    return tuple(model.engine.tokenizer.encode_chat(text))


def _render_text(
    model: ServedModel,
    messages: Sequence[Message],
    variables: TemplateVariables,
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """The text of a chat, as the target's template renders it. Raises ApiError, BadInput."""
    if model.chat_refusal:
        message = f"{model.chat_refusal}: use /v1/completions"
        raise ApiError(400, message, "no_chat_template", "messages")
    plain_messages: Sequence[Mapping[str, Any]] = [
        _to_template_message(message, f"messages.{at}") for at, message in enumerate(messages)
    ]
    if model.channels:
        plain_messages = model.channels.family.fit_history(plain_messages)
    change = model.engine.tokenizer.break_special_tokens
    try:
        texts = (*map(str, plain_messages), *map(str, variables.values()), *map(str, tools))
        _check_characters(model, sum(map(len, texts)), "messages")
        broken = _change_texts([plain_messages, dict(variables), [*tools]], change)
    except RecursionError as error:
        message = "the messages or tools are nested too deeply"
        raise ApiError(400, message, "invalid_value", "messages") from error
    plain_messages, variables, tools = broken
    return render_chat(model.engine.target, plain_messages, variables, tools=tools)


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with other texts, also in the keys of objects."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): _change_texts(one, change) for key, one in value.items()}
        case list() | tuple():
            return [_change_texts(one, change) for one in value]
    return value


def _check_characters(model: ServedModel, count: int, field: str) -> None:
    """Raises ApiError for a text that is too long for any tokenization, before it is tokenized, which takes time."""
    if count > model.max_prompt_characters:
        raise ApiError(
            400,
            f"{_describe_limit(model)}, and {count} characters are more than that",
            "context_length_exceeded",
            field,
        )


def _describe_limit(model: ServedModel) -> str:
    limit = model.max_prompt_tokens
    capacity = model.capacity
    return f"{CONTEXT_LENGTH} {capacity} tokens" + (
        f", of prompts {limit}" if limit < capacity else ""
    )


def _to_template_message(message: Message, path: str) -> dict[str, Any]:
    """A message in the form that chat templates expect: arguments of calls as objects. Raises ApiError."""
    content = message.content
    calls = message.tool_calls
    if content is None and message.role != "assistant":
        raise ApiError(400, f"{path}.content: a text is needed", "invalid_value", f"{path}.content")
    if calls and message.role != "assistant":
        raise ApiError(
            400,
            f"{path}.tool_calls: only answers have calls",
            "invalid_value",
            f"{path}.tool_calls",
        )
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    named = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning or None,
    }
    fields: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments},
            }
            for at, call in enumerate(calls)
            for arguments in [
                _read_arguments(
                    call.function.arguments, f"{path}.tool_calls.{at}.function.arguments"
                )
            ]
        ]
    return {"role": NEWER_ROLES.get(message.role, message.role), "content": text, **fields}


def _read_arguments(text: str, path: str) -> dict[str, Any]:
    """The arguments of an earlier call. Raises ApiError."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{path}: not JSON: {error}", "invalid_value", path) from error
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{path}: a JSON object is needed", "invalid_value", path)
    return arguments


def _count_free_positions(
    model: ServedModel, prompts: Sequence[Sequence[int]], field: str = "prompt"
) -> int:
    """How many tokens fit after the longest prompt; `field` is what errors name. Raises ApiError."""
    longest = max(map(len, prompts))
    if not min(map(len, prompts)):
        raise ApiError(
            400, "the prompt is empty: at least one token is needed", "invalid_value", field
        )
    check_length(model, longest, field)
    return model.capacity + 1 - longest


def check_length(model: ServedModel, tokens: int, field: str) -> None:
    """Raises ApiError for a prompt of so many tokens that it does not fit."""
    if tokens > model.max_prompt_tokens:
        raise ApiError(
            400,
            f"{_describe_limit(model)}, and the prompt has {tokens}",
            "context_length_exceeded",
            field,
        )


def _check_room(model: ServedModel, room: int, max_tokens: int) -> None:
    """Raises ApiError for more tokens than fit."""
    if max_tokens > room:
        longest = model.capacity + 1 - room
        raise ApiError(
            400,
            f"{CONTEXT_LENGTH} {model.capacity} tokens; the prompt has {longest}, and max_tokens is {max_tokens}: only "
            f"{room} fit after the prompt",
            "context_length_exceeded",
            "max_tokens",
        )


def _make_params(
    model: ServedModel,
    body: SampledRequest,
    max_tokens: int,
    logprobs: int | None,
    forced: str | None = None,
) -> SamplingParams:
    """Raises BadInput, and ApiError for what was not precompiled, or cannot be streamed."""
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs are not streamed: use echo with logprobs"
        raise ApiError(400, message, "invalid_value", "prompt_logprobs")
    given = {name: value for name in PARAMETERS if (value := getattr(body, name)) is not None}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    if body.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    asked = _read_output_form(body)
    if asked and forced:
        raise ApiError(
            400,
            "a forced call has its own form: leave response_format out",
            "invalid_value",
            "tool_choice",
        )
    if form := {"grammar": forced} if forced else asked:
        given["structured_outputs"] = form
    params = SamplingParams(
        **{
            "temperature": model.temperature,
            **given,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
        }
    )
    form_field = "tool_choice" if forced else "response_format"
    _check_built(model, params, form_field)
    if params.stop:
        model.require_tokenizer("stop")
    if params.structured_outputs is not None:
        model.require_tokenizer(form_field)
    return params


def _read_output_form(body: SampledRequest) -> Mapping[str, Any] | None:
    """The form of the output, of vLLM's field or of OpenAI's. Raises ApiError where both are given."""
    asked = body.structured_outputs
    match body.response_format:
        case JsonObjectFormat():
            form: Mapping[str, Any] = {"json_object": True}
        case JsonSchemaFormat(json_schema=named):
            form = {"json": named.json_schema or {"type": "object"}}
        case _:
            return asked
    if asked is not None:
        raise ApiError(
            400,
            "structured_outputs and response_format: give one of the two",
            "invalid_value",
            "response_format",
        )
    return form


def name_output_form(body: SampledRequest, error: BadInput) -> ApiError | None:
    """The engine's refusal of a form of the output, by the field that the client gave; None for other errors."""
    if not (message := str(error)).startswith("structured_outputs"):
        return None
    if body.structured_outputs is not None:
        return ApiError(400, message, "invalid_value", "structured_outputs")
    has_form = isinstance(body.response_format, JsonObjectFormat | JsonSchemaFormat)
    field = "response_format" if has_form else "tools"
    message = re.sub(r"^structured_outputs(\.(json|grammar)\b)?", field, message)
    return ApiError(400, message, "invalid_value", field)


def _check_built(model: ServedModel, params: SamplingParams, form: str = "response_format") -> None:
    """Raises ApiError for what was not precompiled; clients cannot use the command in the engine's own message.

    form: the field that asks for the form of the output. Clients of OpenAI know response_format; structured_outputs is
    vLLM's word for the same.
    """
    if params.sampled_fields and not model.can_sample:
        message = f"this server has greedy decoding only; not supported: {', '.join(params.sampled_fields)}"
        raise ApiError(400, message, "not_built", params.sampled_fields[0])
    masked = masks_min_tokens(params, model.engine.end_token_ids)
    if masked and "constrain" not in model.engine.manifest.sampling:
        message = "min_tokens needs a bundle built with --sampling greedy,sample,constrain, unless no token is a stop"
        raise ApiError(400, message, "not_built", "min_tokens")
    if params.structured_outputs is not None and "constrain" not in model.engine.manifest.sampling:
        raise ApiError(400, "this server was built without structured output", "not_built", form)
    if (
        params.prompt_logprobs is not None
        and "prompt_logprobs" not in model.engine.manifest.sampling
    ):
        message = (
            "log-probabilities of prompts need a bundle that was built "
            "with --sampling greedy,sample,prompt_logprobs"
        )
        raise ApiError(400, message, "not_built", "prompt_logprobs")
    if params.k not in (None, *model.ks):
        raise ApiError(
            400,
            f"k is {params.k}: this server has {', '.join(map(str, model.ks))}",
            "not_built",
            "k",
        )


def _with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of the choice-th choice, with seed + choice in 64 bits."""
    if not choice or params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice + SEEDS) % (2 * SEEDS) - SEEDS)
