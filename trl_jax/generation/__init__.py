"""Prompts to completions: knows parameters and token ids, no trainer and no file.

Names end in axes of `trl_jax.nn`'s alphabet: R rows that are being completed, V vocabulary, T tokens of a row.
"""
