"""What is computed: an Arch of facts, the decoder that obeys it, the head on top."""
