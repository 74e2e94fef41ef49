"""The application: the command ``marglik``, its runs, reports and data sets.

It uses the library, which is the rest of `marglik` and never imports it.
"""
