"""Models of transformers that no backend takes: why, and the nearest model_type that works."""

from __future__ import annotations

_EOS = "it finds the EOS by looking at the data, which a compiled program cannot"
_DATA = "its code decides by the data it sees, which a compiled program cannot"
_IMAGES = "it reads images or layouts beside the text, and a preference pair has none"

REFUSED = {
    "bart": (_EOS, "roberta"),
    "bigbird_pegasus": (_EOS, "big_bird"),
    "canine": ("it hashes characters and has no table of tokens to embed", "bert"),
    "cohere_compass_text": ("torch.export cannot follow its code", "modernbert"),
    "flaubert": (_DATA, "camembert"),
    "funnel": ("it pools the sequence between blocks by operations that trl_jax has no counterpart of", "electra"),
    "jetmoe": (_DATA, "mixtral"),
    "layoutlmv2": (_IMAGES, "layoutlm"),
    "layoutlmv3": (_IMAGES, "layoutlm"),
    "longformer": (_DATA, "big_bird"),
    "mbart": (_EOS, "xlm-roberta"),
    "modernvbert": (_IMAGES, "modernbert"),
    "mt5": (_EOS, "xlm-roberta"),
    "mvp": (_EOS, "roberta"),
    "perceiver": (_IMAGES, "bert"),
    "plbart": (_EOS, "roberta"),
    "reformer": ("its attention sorts tokens into buckets for one fixed length", "big_bird"),
    "t5": (_EOS, "modernbert"),
    "t5gemma": ("it is an encoder-decoder, and TRL's rows give it nothing to decode", "gemma2"),
    "t5gemma2": ("it is an encoder-decoder, and TRL's rows give it nothing to decode", "gemma3_text"),
    "tapas": ("it reads tables, and a preference pair has none", "bert"),
    "ultravbert": (_IMAGES, "ultrabert"),
    "umt5": (_EOS, "xlm-roberta"),
    "xlm": (_DATA, "xlm-roberta"),
    "xmod": (_DATA, "xlm-roberta"),
    "yoso": ("its attention has a backward pass of its own, which is lost in the export", "nystromformer"),
    "zamba": ("torch.export cannot follow its code", "jamba"),
    "zamba2": ("torch.export cannot follow its code", "jamba"),
}
