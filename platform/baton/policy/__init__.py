"""Pure decisions: admission, placement, routing, prefix index, roles, scaling, forecast."""
