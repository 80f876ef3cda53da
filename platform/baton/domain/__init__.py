"""The vocabulary: frozen values, events, commands and errors that every other package uses."""
