"""The facts that tell one encoder from another."""

from __future__ import annotations

from dataclasses import dataclass

from trl_jax.nn.attention.disentangled import Distances
from trl_jax.nn.rope import Rope


@dataclass(frozen=True)
class HeadFacts:
    """How hidden states become a score: pooled, `dense`, activation, maybe a norm, `out`.

    `pooling` is "first" (the first token) or "mean" (of the text). `dense_bias` is that of `dense`.
    """

    activation: str
    pooling: str = "first"
    dense_bias: bool = True
    normed: bool = False
    dropout_before: float = 0.0
    dropout_after: float = 0.0


@dataclass(frozen=True)
class ConvolutionFacts:
    """A convolution over the embedded text, parallel to the first layer: `width` tokens at once, in groups of channels.
    """

    width: int
    groups: int
    activation: str
    dropout: float = 0.0


@dataclass(frozen=True)
class EncoderArch:
    """An encoder's facts. Sizes are counts of channels, heads, layers or tokens.

    `prenorm`: a layer norms what attention and MLP read, the first layer's attention reads the embedding itself, and
    a last norm closes the stack; otherwise it norms each sum. `norm` is a key of nn.norm.NORMS, `activation` of
    nn.mlp.ACTIVATIONS. `ropes` and `windows` have an entry a layer; both are empty where layers are all alike and do
    not turn. `learned_positions` counts the rows of a table of positions; with `positions_skip_pads` a pad has the
    row `padding_idx` of it, and tokens count on from there. `type_vocab_size` counts the rows of a table of which a
    single text has the first; 0 is none. `distances` stands for disentangled attention. `padding_idx` is the row of
    the embedding that never trains. `initializer_cutoff` bounds new weights of the head, in standard deviations.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    head: HeadFacts
    embedding_size: int | None = None
    prenorm: bool = False
    norm: str = "layer"
    activation: str = "gelu"
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    ropes: tuple[Rope | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    learned_positions: int | None = None
    positions_skip_pads: bool = False
    type_vocab_size: int = 0
    distances: Distances | None = None
    convolution: ConvolutionFacts | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    attention_out_dropout: float = 0.0
    mlp_dropout: float = 0.0
    mlp_out_dropout: float = 0.0
    distance_dropout: float = 0.0
    initializer_range: float = 0.02
    initializer_cutoff: float | None = None
    padding_idx: int | None = None

    @property
    def num_key_heads(self) -> int:
        """Each head has keys of its own."""
        return self.num_heads

    @property
    def drops_out(self) -> bool:
        rates = (self.embedding_dropout, self.attention_dropout, self.attention_out_dropout, self.mlp_dropout)
        rates += (self.mlp_out_dropout, self.distance_dropout, self.head.dropout_before, self.head.dropout_after)
        return any(rates)

    @property
    def takes_packed(self) -> bool:
        """Whether texts may lie end to end: what goes by distances, or reads neighbours, has not been taught to."""
        return self.distances is None and self.convolution is None

    @property
    def max_positions(self) -> int | None:
        """The length of the longest text that has positions; None where any has."""
        if self.learned_positions is None:
            return None
        return self.learned_positions - (self.padding_idx + 1 if self.positions_skip_pads else 0)
