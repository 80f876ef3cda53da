"""The configuration language: text to trees to frozen values."""
