"""The only room that knows Hugging Face's formats: config.json, safetensors, and which name on disk is which array."""
