"""Online training: prompt samplers, completions, tools, rewards, vLLM servers and the completions table."""
