"""HTTP servers for operators."""
