"""Online training: steps and their prompts, completions, tools, rewards, vLLM servers and the completions table."""
