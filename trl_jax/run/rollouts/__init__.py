"""Runs that make their rows themselves: rollouts of the run's model, tokenizer and task, and judges of completions."""
