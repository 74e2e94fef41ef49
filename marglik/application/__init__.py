"""The application: the command ``marglik``, its runs, reports and data sets.

It uses the library, all other modules of `marglik`. The library never imports the application.
"""
