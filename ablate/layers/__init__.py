"""The quantised linear layer, the state that a model's layers share, and ``apply_recipe`` for any model."""
