"""The page: what the command line shows, for people who would rather look and click.

Files without a build step (`static`), and JSON that is read from the label store and the registry
of this machine (`api`). Nothing here changes anything, and the browser asks no other host.
"""
