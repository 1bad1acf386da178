"""Models: the built-in decoders, Hugging Face's, the user's own."""
