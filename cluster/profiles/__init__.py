"""Static and kernel profiles of whole pools, made by many processes and kept."""
