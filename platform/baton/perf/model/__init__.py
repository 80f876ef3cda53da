"""The shape of a model, and the memory and work that follow from it."""
