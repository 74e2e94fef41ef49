"""The commands of `marglik`, one file each: its options, and what it prints."""
