"""Adapters to other libraries. A missing library raises an error that says what to install."""
