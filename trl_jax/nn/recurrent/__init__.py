"""Layers with a state or a short convolution: what each token sees of those before it is handed along the text."""
