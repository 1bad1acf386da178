from ablate.integrations.hf import AblateCallback  # noqa: F401  its name marks an adapter
