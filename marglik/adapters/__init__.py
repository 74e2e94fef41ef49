"""Adapters to other libraries. If a library is missing, the error has the install command."""
