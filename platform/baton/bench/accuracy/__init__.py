"""How far the performance model is off what others measured."""
