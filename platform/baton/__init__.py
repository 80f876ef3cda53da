"""baton: prefill runs the first leg of a request, decode the second; the KV cache is the baton."""

__version__ = "0.1.0"
