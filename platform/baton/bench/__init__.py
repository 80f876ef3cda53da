"""An open-loop load client, trace replay, and their reports."""
