"""Sampling parameters of a request: type, bounds, default and meaning of each field, declared once.

The annotations of `SamplingParams` are the declaration; `PARAMETERS` is the same as a table. The checks of
`SamplingParams`, the fields of JSON lines, the flags of dflash-run and the models of HTTP requests come from there.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import MappingProxyType, NoneType
from typing import Annotated, Any, get_args, get_type_hints

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.sampling_state import MAX_TOP_LOGPROBS

PENALTIES_AND_BIAS = frozenset(
    {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"}
)
# All numbers are float32 on the device: beyond these bounds they change nothing, or overflow.
LARGEST, SMALLEST_TOP_P = 10_000, 1e-6
LARGEST_BIAS = 100  # as in OpenAI's interface: enough to ban a token or to force it
SEEDS = 1 << 63
TOKEN_ID_PATTERN = "^(0|[1-9][0-9]{0,9})$"  # token ids as names of a JSON object
NEEDED = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Sequence[str]: "a list of texts, none of them empty",
    Sequence[int]: "a list of token ids",
    Mapping[int, float]: "a mapping of token ids to numbers",
    Mapping[str, Any]: "a mapping with one of json, json_object, regex, choice and grammar",
}


@dataclass(frozen=True)
class Parameter:
    """The declaration of one field of `SamplingParams`. `name` and all after it are read from the annotated field."""

    meaning: str  # for --help and OpenAPI
    minimum: float | None = None  # inclusive, as `maximum`; of each number in a mapping
    maximum: float | None = None
    needs_sampling: bool = False  # whether any value but the default needs sampled executables
    name: str = ""
    type: Any = None  # without None
    optional: bool = False  # whether None is accepted
    default: Any = None  # the neutral value

    @property
    def needed(self) -> str:
        """What is accepted, in words."""
        if self.minimum is None:
            return NEEDED[self.type]
        bounds = (
            f"of at least {self.minimum}"
            if self.maximum is None
            else f"from {self.minimum} to {self.maximum}"
        )
        return f"{NEEDED[self.type]} {bounds}"

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.type in (bool, str):
            return isinstance(value, self.type)
        if self.type == Sequence[str]:
            return _is_list(value, str) and all(value)
        if self.type == Sequence[int]:
            return _is_list(value, int)
        if self.type == Mapping[str, Any]:
            return isinstance(value, Mapping)
        if self.type == Mapping[int, float]:
            return isinstance(value, Mapping) and all(
                type(token) is int and token >= 0 and self._holds(bias)
                for token, bias in value.items()
            )
        return self._holds(value) and (self.type is float or type(value) is int)

    def _holds(self, value: Any) -> bool:
        """Whether a value is a number within the bounds. NaN is not: each comparison with NaN is false."""
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and (self.minimum is None or self.minimum <= value)
            and (self.maximum is None or value <= self.maximum)
        )


Sampled = partial(Parameter, needs_sampling=True)


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    The logits are changed in vLLM's order: logit_bias, repetition_penalty (divides positive logits, multiplies negative
    logits), presence_penalty and frequency_penalty, temperature, min_p, top_k, top_p. Log-probabilities are of the
    logits before these changes. With a seed, the text depends on neither K nor other requests. `ignore_eos` disables
    the target's end tokens, and so does any list of `stop_token_ids`. For the first `min_tokens` tokens no token is
    chosen that would end the output, and stop texts are not looked for. Rows of a round share the largest `k` of their
    requests.
    """

    max_tokens: Annotated[int | None, Parameter("maximum number of new tokens", 0)] = None
    min_tokens: Annotated[
        int, Parameter("number of new tokens before the output may end by a stop", 0)
    ] = 0
    temperature: Annotated[
        float, Sampled("0 for greedy decoding; above 0, tokens are sampled", 0, LARGEST)
    ] = 0.0
    top_k: Annotated[
        int, Parameter("sample from this many of the likeliest tokens; 0 for all", 0)
    ] = 0
    top_p: Annotated[
        float,
        Parameter(
            "sample from the fewest likeliest tokens whose mass reaches this; 1 for all",
            SMALLEST_TOP_P,
            1,
        ),
    ] = 1.0
    seed: Annotated[
        int | None,
        Parameter(
            "the same seed and prompt give the same text; default: a random seed", -SEEDS, SEEDS - 1
        ),
    ] = None
    stop: Annotated[
        Sequence[str], Parameter("texts that end the output; left out of the output")
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int] | None,
        Parameter("tokens that end the output, kept in it; default: the target's end tokens"),
    ] = None
    ignore_eos: Annotated[bool, Parameter("continue after the target's end tokens")] = False
    trace: Annotated[bool, Parameter("also report the drafted tokens of every round")] = False
    min_p: Annotated[
        float,
        Parameter(
            "sample from tokens at least this likely, relative to the likeliest; 0 for all", 0, 1
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Sampled(
            "above 1, tokens of the prompt and the output become less likely", 1 / LARGEST, LARGEST
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Sampled("subtracted from the logits of tokens in the output", -LARGEST, LARGEST)
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Sampled(
            "subtracted from the logits of tokens in the output, per occurrence", -LARGEST, LARGEST
        ),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Sampled("added to the logits of single tokens", -LARGEST_BIAS, LARGEST_BIAS),
    ] = None
    logprobs: Annotated[
        int | None,
        Sampled(
            "report the log-probability of each token, and of this many likeliest tokens",
            0,
            MAX_TOP_LOGPROBS,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Parameter(
            "report the log-probability of each token of the prompt, and of this many likeliest tokens",
            0,
            MAX_TOP_LOGPROBS,
        ),
    ] = None
    k: Annotated[
        int | None,
        Parameter(
            "drafted tokens to verify per round, one of the grid's K; default: the engine's choice",
            0,
        ),
    ] = None
    prefix_caching: Annotated[
        bool,
        Parameter(
            "use the kv of prompts that were seen before, and keep this prompt's kv for others"
        ),
    ] = True
    cache_salt: Annotated[
        str | None, Parameter("only requests with the same text here share the kv of their prompts")
    ] = None
    structured_outputs: Annotated[
        Mapping[str, Any] | None,
        Parameter(
            "the form of the output: one of json (a schema), json_object, regex, choice and grammar, as in vLLM"
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises BadInput."""
        for name, parameter in PARAMETERS.items():
            if not parameter.accepts(value := getattr(self, name)):
                raise BadInput(f"{name} is {reprlib.repr(value)}: {parameter.needed} is needed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadInput(
                f"min_tokens is {self.min_tokens}, and max_tokens only {self.max_tokens}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the greedy executables are enough."""
        return not self.sampled_fields

    @cached_property
    def is_penalised(self) -> bool:
        """Whether a bias or a penalty changes logits."""
        return not PENALTIES_AND_BIAS.isdisjoint(self.sampled_fields)

    @property
    def sampled_fields(self) -> tuple[str, ...]:
        """The given parameters that need sampled executables; top_k, top_p and min_p never change a greedy choice."""
        given = {
            name: getattr(self, name)
            for name, parameter in PARAMETERS.items()
            if parameter.needs_sampling
        }
        return tuple(
            name for name, value in given.items() if value not in (PARAMETERS[name].default, {})
        )


def _read_declarations() -> Mapping[str, Parameter]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    table = {}
    for field in fields(SamplingParams):
        annotation, parameter = get_args(hints[field.name])
        (kind, *rest) = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
        table[field.name] = replace(
            parameter, name=field.name, type=kind, optional=bool(rest), default=field.default
        )
    return MappingProxyType(table)


def _is_list(values: object, kind: type) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str | bytes | bytearray)
        and all(type(value) is kind for value in values)
    )


PARAMETERS = _read_declarations()
