"""Back ends: who quantises and multiplies. All give the quantised bits of ``ablate.numerics``."""
