"""Rotary embedding (RoPE): frequencies and their scaling, read from a `config.json`.

Formulas as in transformers' `modeling_rope_utils`, which the published models were trained and are served with.
"""

import math
from decimal import Context, Decimal
from functools import cache

import msgspec

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.config_file import MAX_INTEGER, ConfigFile

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ORIGINAL_POSITIONS = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
# Keys of `rope_parameters` and `rope_scaling` that are read.
ROPE_KEYS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        ORIGINAL_POSITIONS,
        PARTIAL,
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)
VALUE_RANGE = (1e-9, 1e15)  # far beyond any model; frequencies stay within float32
# For powers and logarithms that are the same on every machine, because programs and bundles hold them: those of the C
# library differ in the last bit between processors with and without FMA.
EXACT = Context(prec=30)


class LinearScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """Position interpolation: positions are divided by `factor` (Chen et al. 2023)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="llama3"):
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, with a ramp between.

    Attributes:
        low_frequency_factor, high_frequency_factor: turns over the original context where the
            ramp starts and ends.
        original_positions: length of the original context.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


class YarnScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="yarn"):
    """YaRN: interpolation per frequency (Peng et al. 2023).

    Attributes:
        factor: divisor of the slow frequencies.
        original_positions: length of the original context.
        beta_fast, beta_slow: turns over the original context above which a frequency is kept,
            below which it is divided.
        truncated: bounds of the ramp are rounded to whole dimensions.
        attention_factor: scale of cosines and sines.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncated: bool
    attention_factor: float


class ProportionalScaling(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="proportional"
):
    """Gemma 4's: only the fastest frequencies turn; the others, which are paired as they would be, are zero.

    Attributes:
        turning: frequencies that turn.
        factor: their divisor.
    """

    turning: int
    factor: float


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rotary embedding; unscaled frequencies are theta^(-2i/D), as in Su et al. 2021.

    Attributes:
        theta: the base.
        head_dim: width of a head, or of the first part of it that is rotated.
        scaling: None for unscaled frequencies.
    """

    theta: float
    head_dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling | None = None

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Returns D/2 angles per position, in radians, highest first."""
        plain = _list_plain_frequencies(self.theta, self.head_dim)
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return tuple(frequency / factor for frequency in plain)
            case Llama3Scaling() as llama3:
                return tuple(_scale_llama3(frequency, llama3) for frequency in plain)
            case YarnScaling() as yarn:
                return _scale_yarn(plain, yarn, self.theta, self.head_dim)
            case ProportionalScaling(turning, factor):
                still = (0.0,) * (len(plain) - turning)
                return (*(one / factor for one in plain[:turning]), *still)

    @property
    def reach(self) -> int:
        """The positions to which YaRN stretches the original context; 0 for other embeddings."""
        if not isinstance(self.scaling, YarnScaling):
            return 0
        return int(min(self.scaling.factor * self.scaling.original_positions, MAX_INTEGER))

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0


def read_rope(config: ConfigFile, head_dim: int, positions: int) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4). Raises BadCheckpoint."""
    for place in (config, *_list_sections(config)):
        _refuse_partial(place)
    return _read_rope(config, head_dim, positions)


def read_partial_rope(config: ConfigFile, head_dim: int, positions: int, default: float) -> Rope:
    """As `read_rope`, where only the first part of a head is rotated: `partial_rotary_factor`, or `default`, of it.

    Text has the same position on all three axes of a multimodal embedding, so `mrope_section` changes nothing.
    """
    places = [place for place in (*_list_sections(config), config) if place.has(PARTIAL)]
    factors = [place.number_within(PARTIAL, 1e-3, 1.0) for place in places] or [default]
    if len(set(factors)) > 1:
        raise places[-1].refusal(
            PARTIAL, factors[-1], f"but {places[0].where(PARTIAL)} is {factors[0]}"
        )
    width = int(head_dim * factors[0])
    if width < 2 or width % 2:
        raise config.refusal(
            PARTIAL, factors[0], f"rotary embedding needs an even width, and this is {width}"
        )
    return _read_rope(config, width, positions)


def read_layer_rope(config: ConfigFile, layer_type: str, head_dim: int) -> Rope:
    """Reads the embedding of a type of layers in `rope_parameters`, as Gemma 4 has them. Raises BadCheckpoint."""
    section = config.section("rope_parameters").section(layer_type)
    if not section.values:
        raise BadCheckpoint(f"{config.where(f'rope_parameters.{layer_type}')} is missing")
    theta = _read_theta(section)
    match section.require("rope_type", str):
        case "default":
            _refuse_partial(section)
            return Rope(theta, head_dim)
        case "proportional":
            share = section.number_within(PARTIAL, 1e-3, 1.0) if section.has(PARTIAL) else 1.0
            factor = _read_number(section, "factor", 1.0)
            return Rope(theta, head_dim, ProportionalScaling(int(share * head_dim // 2), factor))
        case kind:
            raise section.refusal("rope_type", kind, "supported are default, proportional")


def _read_theta(section: ConfigFile) -> float:
    theta = section.number_within("rope_theta", *VALUE_RANGE)
    if theta <= 1:
        raise section.refusal(
            "rope_theta", theta, "expected more than 1, so that frequencies decrease"
        )
    return theta


def _list_sections(config: ConfigFile) -> list[ConfigFile]:
    return [config.section(key) for key in ("rope_parameters", "rope_scaling") if config.has(key)]


def _read_rope(config: ConfigFile, head_dim: int, positions: int) -> Rope:
    sections = _list_sections(config)
    scalings = [_read_scaling(config, section, positions) for section in sections]
    if len(set(scalings)) > 1:
        raise config.refusal(
            "rope_scaling", config.values["rope_scaling"], "rope_parameters has another scaling"
        )
    named = next((section for section in sections if section.has("rope_theta")), config)
    return Rope(_read_theta(named), head_dim, scalings[0] if scalings else None)


def _refuse_partial(place: ConfigFile) -> None:
    if place.has(PARTIAL) and place.positive_number(PARTIAL) != 1:
        raise place.refusal(
            PARTIAL, place.values[PARTIAL], "only the rotation of whole heads is supported"
        )


def _read_scaling(
    config: ConfigFile, section: ConfigFile, positions: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    key = "rope_type" if section.has("rope_type") else "type"  # the name in older files
    for layer_type, value in section.values.items():
        if isinstance(value, dict):
            raise section.refusal(
                layer_type, value, "only one rotary embedding for all layers is supported"
            )
    match section.optional(key, str):
        case None if section.has("factor"):
            raise BadCheckpoint(f"{section.where('rope_type')} is missing, but factor is set")
        case None | "default":
            return None
        case "linear":
            return LinearScaling(_read_number(section, "factor"))
        case "llama3":
            return _read_llama3(config, section)
        case "yarn":
            return _read_yarn(config, section, positions)
        case kind:
            raise section.refusal(key, kind, f"supported are {', '.join(ROPE_TYPES)}")


def _read_llama3(config: ConfigFile, section: ConfigFile) -> Llama3Scaling:
    low, high = (_read_number(section, key) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise section.refusal(
            "low_freq_factor", low, f"expected less than high_freq_factor, which is {high}"
        )
    original = _place_of_original(config, section).positive(ORIGINAL_POSITIONS)
    return Llama3Scaling(_read_number(section, "factor"), low, high, original)


def _read_yarn(config: ConfigFile, section: ConfigFile, positions: int) -> YarnScaling:
    """Reads YaRN's parameters with the defaults of transformers."""
    place = _place_of_original(config, section)
    if not (place.has(ORIGINAL_POSITIONS) or section.has("factor")):
        raise BadCheckpoint(
            f"{section.where('factor')} is missing, and cannot be derived because {ORIGINAL_POSITIONS} is missing too"
        )
    original = place.positive(ORIGINAL_POSITIONS, default=positions)
    factor = _read_number(section, "factor", default=positions / original)
    fast = _read_number(section, "beta_fast", 32.0)
    slow = _read_number(section, "beta_slow", 1.0)
    if fast < slow:
        raise section.refusal(
            "beta_fast", fast, f"expected no less than beta_slow, which is {slow}"
        )
    return YarnScaling(
        factor=factor,
        original_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncated="truncate" not in section.values
        or bool(section.optional("truncate", bool)),  # transformers reads null as false
        attention_factor=_read_number(
            section, "attention_factor", default=_default_attention_factor(section, factor)
        ),
    )


def _default_attention_factor(section: ConfigFile, factor: float) -> float:
    scales = [
        _read_number(section, key) for key in ("mscale", "mscale_all_dim") if section.has(key)
    ]
    if len(scales) < 2:
        return _attention_scale(factor, 1.0)
    return _attention_scale(factor, scales[0]) / _attention_scale(factor, scales[1])


def _place_of_original(config: ConfigFile, section: ConfigFile) -> ConfigFile:
    """Returns where the original context length is: the top level takes precedence, as in transformers."""
    return config if config.has(ORIGINAL_POSITIONS) else section


def _read_number(section: ConfigFile, key: str, default: float | None = None) -> float:
    if default is not None and not section.has(key):
        return default
    return section.number_within(key, *VALUE_RANGE)


def _attention_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * _log(factor) + 1.0


def _scale_llama3(frequency: float, scaling: Llama3Scaling) -> float:
    turns = scaling.original_positions * frequency / (2 * math.pi)  # over the original context
    if turns > scaling.high_frequency_factor:
        return frequency
    if turns < scaling.low_frequency_factor:
        return frequency / scaling.factor
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _scale_yarn(
    plain: tuple[float, ...], scaling: YarnScaling, theta: float, head_dim: int
) -> tuple[float, ...]:
    """Keeps frequencies that turn more than beta_fast times over the original context, and divides slow ones."""

    def index(turns: float) -> float:
        return (
            head_dim * _log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * _log(theta))
        )

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncated:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramps = (min(max((i - low) / span, 0.0), 1.0) for i in range(len(plain)))
    return tuple(
        frequency / scaling.factor * ramp + frequency * (1 - ramp)
        for frequency, ramp in zip(plain, ramps, strict=True)
    )


@cache
def _list_plain_frequencies(theta: float, head_dim: int) -> tuple[float, ...]:
    """The frequencies without scaling; 64 take 2 ms."""
    base = Decimal(theta)
    return tuple(float(EXACT.power(base, Decimal(-2 * i / head_dim))) for i in range(head_dim // 2))


def _log(number: float) -> float:
    return float(EXACT.ln(Decimal(number)))
