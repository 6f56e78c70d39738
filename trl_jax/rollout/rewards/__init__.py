"""Reward functions and reward models, from the arguments of a trainer to the rewards of completions."""
