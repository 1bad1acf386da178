"""Back ends quantise and multiply. All produce the quantised bits of ``ablate.numerics``."""
