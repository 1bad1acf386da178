"""Quantisers: the compiled CPU quantiser, and the packing of operands for native GEMMs."""
