"""This machine and this process: /proc, environments, forks, the data folder."""
