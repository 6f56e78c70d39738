"""Models: an Arch of facts, the decoder or encoder that obeys it, the head on top."""
