"""Web page with predictions, campaigns, labels and snapshots.

It consists of static files without a build step (`static`) and a read-only JSON API over the label
store and registry of this machine (`api`). The browser contacts no other host.
"""
