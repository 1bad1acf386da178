"""The quantised linear layer, what the layers of a model share, and a recipe put on any model."""
