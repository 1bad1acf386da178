"""*Modelled* speed and memory on named hardware, never measured."""
