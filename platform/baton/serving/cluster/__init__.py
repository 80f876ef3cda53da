"""The Ray cluster: started, joined, watched and ended."""
