"""The performance model: how long engines take, fitted to what they report."""
