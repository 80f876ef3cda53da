"""Pure decisions: the same functions run in the live system and in the simulator."""
