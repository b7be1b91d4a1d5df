"""HTTP server and web page: predictions, campaigns, labels and snapshots in a browser."""
