"""Generation: prompts of token ids to completions. Knows a model's graph and arrays; no checkpoint, no trainer."""
