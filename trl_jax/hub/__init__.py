"""Hugging Face formats: config.json, safetensors and the names of tensors on disk. No other package knows them."""
