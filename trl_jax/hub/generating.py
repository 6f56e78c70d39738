"""TEMP"""
from __future__ import annotations
import numpy as np, jax.numpy as jnp
from trl_jax.generation.generator import Request, Weights, generate
from trl_jax.generation.noise import PrefetchedWords, chunk_steps
from trl_jax.generation.options import Options, Text, logits_processors, sampling_processors

def complete(model, prompt_ids, options, *, group, eos, pad, stream, dtype):
    new = options["max_new_tokens"]
    fields = {k: v for k, v in options.items() if k in Options.__dataclass_fields__}
    o = Options(**fields)
    prompts = [np.asarray(p, np.int32) for p in prompt_ids[::group]]
    width = max(map(len, prompts))
    text = Text(tuple(eos), width, width + new, model.vocab_size)
    procs = tuple(logits_processors(o, text).values()) + tuple(sampling_processors(o).values())
    rows = len(prompt_ids)
    steps = chunk_steps(rows, model.vocab_size, 16)
    words = PrefetchedWords(stream, rows=rows, vocabulary=model.vocab_size, steps=steps, max_steps=new)
    out = generate(Weights.of(model.graph, model.arrays, dtype), Request(prompts, group, tuple(eos), pad, new, procs), words, steps=steps)
    words.close(out.tokens.shape[1])
    return out
