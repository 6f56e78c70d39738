"""The values that layers keep of tokens for those that follow: keys and values, or the latents
that they come from; the inputs of a short convolution; a state.

G completions follow one prompt and share its keys and values: P prompts have P x G rows of completions, those of a
prompt side by side. T counts the completions' places in the cache, S the prompts'.
"""
