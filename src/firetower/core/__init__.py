"""Records, codec, bits, configuration and errors: what every room may import. Torch-free."""
