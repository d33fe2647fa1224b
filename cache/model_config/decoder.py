"""The keys of a `config.json` that targets and drafts have in common."""

from dflash_aot.cache.model_config.architecture import AttentionShape, Decoder, DenseMlp, MixtureOfExperts
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.rope import read_rope

# Far beyond any model, and near enough that a list per layer or per head position stays small.
MAX_LAYERS, MAX_HEAD_DIM = 1 << 12, 1 << 14


def read_decoder(config: ConfigFile, mlp: DenseMlp | MixtureOfExperts, normed: bool, head_dim: int) -> Decoder:
    """A decoder with what sets its family apart. Raises BadCheckpoint; no default stands in for a fact."""
    if (activation := config.require("hidden_act", str)) != "silu":
        raise config.refusal("hidden_act", activation, "'silu' is what these layers compute")
    attention = AttentionShape(
        heads=config.positive("num_attention_heads"),
        kv_heads=config.positive("num_key_value_heads"),
        head_dim=head_dim,
        normed=normed,
        biased=bool(config.optional("attention_bias", bool)),
    )
    if attention.heads % attention.kv_heads:
        raise config.refusal("num_attention_heads", attention.heads, f"not a multiple of {attention.kv_heads} kv heads")
    if head_dim > MAX_HEAD_DIM:
        raise config.refusal("head_dim", head_dim, f"expected at most {MAX_HEAD_DIM}")
    if head_dim % 2:
        raise config.refusal("head_dim", head_dim, "rotation needs an even width")
    positions = config.positive("max_position_embeddings")
    return Decoder(
        layers=config.positive("num_hidden_layers", most=MAX_LAYERS),
        hidden=config.positive("hidden_size"),
        mlp=mlp,
        attention=attention,
        rope=read_rope(config, head_dim, positions),
        epsilon=config.number_within("rms_norm_eps", 1e-30, 1.0),
        vocab=config.positive("vocab_size"),
        positions=positions,
    )


def read_dense(config: ConfigFile) -> DenseMlp:
    """The MLP of a dense model."""
    return DenseMlp(config.positive("intermediate_size"))
