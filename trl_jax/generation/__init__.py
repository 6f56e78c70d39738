"""Text generation: batched decoding with a KV cache, and transformers' sampling options."""
