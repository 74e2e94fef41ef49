"""The commands' work, and their options."""
