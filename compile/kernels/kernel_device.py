"""The operands of kernels by name, and the device that kernels are lowered for. No Pallas is imported."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice

LANES, SUBLANES = 128, 8  # of a vector register
# Positions of the unit of copies: 16 rows of bfloat16 are whole memory tiles on every generation.
PAGES = (128, 64, 32, 16)
STREAM_ROWS = 16  # tokens of a streamed layer come in memory tiles of bfloat16, or two of float32
KERNEL_TARGET = "tpu_custom_call"  # of a kernel's custom call
KERNEL_VMEM = 30 * 2**20  # bytes that the kernel of MLPs may use, where there is as much
RESERVED_VMEM = 2 * 2**20  # for what the compiler itself keeps there
MAX_TOKENS = 256  # of a call of that kernel: more of them take longer to multiply than matrices take to be read


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


@dataclass(frozen=True)
class InputConvolution:
    """The weights of the convolution before a sublayer, of all layers of a draft.

    L layers · J taps · G groups of channels · H hidden

    Attributes:
        projection: of the coefficients before and after the sublayer, [L, 2 J G, H].
        base: float32 [L, 2, J, H].
        layer: int32 scalar.
        group: channels of a group.
    """

    projection: jax.Array
    base: jax.Array
    layer: jax.Array
    group: int


@dataclass(frozen=True)
class ExpertChoice:
    """The experts that the tokens of a call choose in a layer; see `ChosenExperts`."""

    shares: jax.Array
    numbers: jax.Array
    count: jax.Array


@dataclass(frozen=True)
class RoutingSizes:
    """Sizes of a router, and how its tokens choose.

    Attributes:
        hidden: H.
        experts: E.
        chosen: experts of each token.
        normalized: whether their weights are scaled to sum to one.
    """

    hidden: int
    experts: int
    chosen: int
    normalized: bool


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens before the experts of a layer, and the weights with which they choose.

    L layers · E experts · H hidden · n tokens

    Attributes:
        rows: before the norm [n, H].
        norm: weight of the norm, float32 [H].
        epsilon: of the norm.
        rounded: whether a normed row is rounded before its product with the weight, as well as after it.
        router: of all layers [L, E, H].
        shared: gate of the shared expert of all layers [L, 1, H]; None without a shared expert.
        layer: int32 scalar.
    """

    rows: jax.Array
    norm: jax.Array
    epsilon: float
    rounded: bool
    router: jax.Array
    shared: jax.Array | None
    layer: jax.Array


class Routing(NamedTuple):
    """What a router makes of tokens.

    Attributes:
        tokens: normed [n, H].
        choice: their experts.
        shared: the shared expert's part in each token's output [n, 1]; None without a shared expert.
    """

    tokens: jax.Array
    choice: ExpertChoice
    shared: jax.Array | None


@dataclass(frozen=True)
class ChosenExperts:
    """The experts that tokens chose in a layer, and where their matrices lie.

    E experts · X experts of all layers · M width of an expert · H hidden · n tokens

    Attributes:
        gate_up: gate above up, of the experts of all layers [X, 2M, H].
        down: of the same [X, H, M].
        first: the layer's first expert, int32 scalar.
        numbers: the chosen experts of the layer in ascending order, int32 [E]; after them any number below E.
        count: of chosen experts, int32 scalar.
        shares: float32 [n, E], the weight of each expert in each token's output; 0 for those that it did not choose.
        gate_up_scale: of int8 matrices, a float32 scale for each row [2X, M]: gate and up of each expert in turn. Or
            [X, 2, M]: a TPU lays out both forms differently, and would copy one that is made of the other.
        down_scale: of the same [X, H].
        activation: of the gates, "silu" or "gelu". With gelu, chosen experts' shares may be negative.
        clamped: limit and slope of gpt-oss's activation, in place of the other; None for the other.
        gate_up_bias: of clamped experts, float32 [X, 2, M].
    """

    gate_up: jax.Array
    down: jax.Array
    first: jax.Array
    numbers: jax.Array
    count: jax.Array
    shares: jax.Array
    gate_up_scale: jax.Array | None = None
    down_scale: jax.Array | None = None
    activation: str = "silu"
    clamped: tuple[float, float] | None = None
    gate_up_bias: jax.Array | None = None


def is_chosen(shares: jax.Array, activation: str) -> jax.Array:
    """Whether shares are those of chosen experts, see `ChosenExperts`."""
    return shares != 0 if activation == "gelu" else shares > 0


@dataclass(frozen=True)
class StreamSizes:
    """Sizes of what a kernel streams between the attentions of two layers, see `StreamWeights`.

    Attributes:
        tokens: of a call.
        rows: of the attention's arrays: those of the call, where each fills memory tiles, or 1.
        hidden: H.
        width: M.
        mixed: Q.
        queries: P.
        keys_values: K.
        head: width of a head.
        item: bytes of a number.
        stored: bytes of a number of the matrices.
    """

    tokens: int
    rows: int
    hidden: int
    width: int
    mixed: int
    queries: int
    keys_values: int
    head: int
    item: int
    stored: int


@dataclass(frozen=True)
class OutputWeights:
    """The weights of all layers, for what lies between a mixer and the end of its layer.

    The letters are those of `StreamWeights`

    Attributes:
        norm: before the MLP, factors of normed rows, float32 [L, H].
        output: of the mixer [L, H, Q].
        gate_up: gate above up [L, 2M, H].
        down: [L, H, M].
        scales: of the rows of int8 matrices, in the order of the matrices: float32 [L, 1, rows], of gate_up [L, 2, M].
    """

    norm: jax.Array
    output: jax.Array
    gate_up: jax.Array
    down: jax.Array
    scales: tuple[jax.Array, ...] = ()

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays in the order of the kernel's operands."""
        return self.norm, self.output, self.gate_up, self.gate_up, self.down, *self.scales


@dataclass(frozen=True)
class StreamWeights:
    """The weights of all layers, for what lies between the attentions of two layers.

    L layers · H hidden · M width of the MLP · Q width of the attention's result · P width of queries
    K width of keys and values · D head width

    Attributes:
        output: of the attention [L, H, Q].
        gate_up: gate above up [L, 2M, H].
        down: [L, H, M].
        queries: projection of queries [L, P, H].
        keys_values: projection of keys and values [L, K, H].
        mlp_norm: before the MLP, float32 [L, H].
        input_norm: before the projections, float32 [L, H].
        query_norm: of each head, float32 [L, D].
        key_norm: of each head, float32 [L, D].
        scales: of the rows of int8 matrices, in the order of the matrices: float32 [L, 1, rows], of gate_up [L, 2, M].
    """

    output: jax.Array
    gate_up: jax.Array
    down: jax.Array
    queries: jax.Array
    keys_values: jax.Array
    mlp_norm: jax.Array
    input_norm: jax.Array
    query_norm: jax.Array
    key_norm: jax.Array
    scales: tuple[jax.Array, ...] = ()


@dataclass(frozen=True)
class AttendingBlock:
    """A block of T positions per row, which attends to kv positions before the block and to itself.

    B rows · T positions of this call · G kv heads · R query heads per kv head · D head width

    Attributes:
        q: queries [B, G, R, T, D].
        keys: of the block [B, G, T, D].
        values: of the block [B, G, T, D].
        starts: int32 [B], the position of each row's block.
        limits: int32 [4] of the layer: reach, slope, behind, ahead. Position t sees kv positions from
            starts[b] + slope · t - reach on, and the block's positions t - behind … t + ahead.
        windowed: whether the reach of any layer hides kv positions; otherwise it is not looked at.
        sinks: float32 [G, R], scores that take part in the softmax, without values; None for none.
    """

    q: jax.Array
    keys: jax.Array
    values: jax.Array
    starts: jax.Array
    limits: jax.Array
    windowed: bool
    sinks: jax.Array | None = None


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of Gated DeltaNet layers on one device.

    Attributes:
        key_heads: of the device.
        value_heads: of the device, a multiple.
        key_dim: width of a key head.
        value_dim: width of a value head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class DeltaBlock:
    """The blocks of a verification in one Gated DeltaNet layer, from its projections on.

    L layers · N slots · B rows · T tokens · Q key heads · R value heads per key head · V = Q R · I key width
    O value width · C = Q (2 I + R O) channels · J rows of a window

    Attributes:
        channels: what the convolution takes, [B, T, C].
        gates: z, [B, T, V O].
        strengths: β, float32 [B, V, T].
        decays: g, float32 [B, V, T].
        begun: [B]; elsewhere a slot's state and window count as zeros.
        conv: float32 [Q, 2 I + R O, taps].
        norm: float32 [O].
        windows: of all layers and slots [L, N, J, C].
        states: of all layers and slots, float32 [L, N, V, I, O].
        epsilon: of the norm of results.
        norm_epsilon: of the norms of queries and keys.
    """

    channels: jax.Array
    gates: jax.Array
    strengths: jax.Array
    decays: jax.Array
    begun: jax.Array
    conv: jax.Array
    norm: jax.Array
    windows: jax.Array
    states: jax.Array
    epsilon: float
    norm_epsilon: float


@dataclass(frozen=True)
class DeltaProjections:
    """What comes before the blocks of Gated DeltaNet layers: a norm, and four projections.

    The letters are those of `DeltaBlock`, and H hidden

    Attributes:
        norm: factors of normed rows, float32 [L, H].
        strengths: projection of β before its sigmoid [L, V, H].
        decays: projection of g before its softplus [L, V, H].
        biases: of the decays' projection, float32 [L, V, 1].
        rates: factors of the decays, float32 [L, V, 1].
        channels: projection [L, C, H].
        gates: projection [L, V O, H].
        scales: of the rows of both, if they are int8: float32 [L, 1, rows].
    """

    norm: jax.Array
    strengths: jax.Array
    decays: jax.Array
    biases: jax.Array
    rates: jax.Array
    channels: jax.Array
    gates: jax.Array
    scales: tuple[jax.Array, ...] = ()

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays in the order of the kernel's operands."""
        factors = (self.norm, self.strengths, self.decays, self.biases, self.rates)
        return (*factors, self.channels, self.gates, *self.scales)


class DeltaUpdates(NamedTuple):
    """What the blocks of a verification add to the recurrent states, until their accepted tokens are known.

    L layers · the other letters as in `DeltaBlock`

    Attributes:
        keys: float32 [L, B, Q, T, I].
        updates: U of the delta rule in `models.gated_delta_net`, float32 [L, B, V, T, O].
        decays: the sum of the decays up to each token, float32 [L, B, V, T].
        channels: what the convolution took, [L, B, T, C].
    """

    keys: jax.Array
    updates: jax.Array
    decays: jax.Array
    channels: jax.Array


@dataclass(frozen=True)
class DeltaCommit:
    """States and windows, with the blocks of a verification that advance them.

    The letters are those of `DeltaBlock`

    Attributes:
        states: before the blocks, float32 [L, N, V, I, O].
        windows: before the blocks [L, N, J, C].
        pending: what the blocks add, of all layers.
        factors: of each update, and after them that of the state, float32 [L, B, V, T+1]. A state whose factor is 0
            counts as zeros, whatever it holds.
        begun: [B]; elsewhere a window counts as zeros.
        counts: tokens of each block that are kept, int32 [B].
    """

    states: jax.Array
    windows: jax.Array
    pending: DeltaUpdates
    factors: jax.Array
    begun: jax.Array
    counts: jax.Array


@dataclass(frozen=True)
class KernelDevice:
    """The device that kernels are lowered for.

    Attributes:
        kind: JAX's name, which some lowering rules ask for.
        cores: TensorCores of a device.
        interpret: for tests on CPU, where kernels are interpreted: `pltpu.InterpretParams`.
        vmem_bytes: that the kernel of MLPs may use.
        stream_tokens: of a call of the kernel of layers. More take longer to multiply than its matrices to be read.
        attends: whether heads are of whole vector registers, which the kernel of attention needs.
    """

    kind: str
    cores: int
    interpret: Any = False
    vmem_bytes: int = KERNEL_VMEM
    stream_tokens: int = MAX_TOKENS
    attends: bool = True

    def describe(self) -> AbstractDevice:
        """The device as JAX's lowering rules ask for it."""
        return AbstractDevice(device_kind=self.kind, num_cores=self.cores, platform="tpu")
